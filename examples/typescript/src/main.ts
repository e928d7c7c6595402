// Registers an engine, grants a lease, renews, pins, watches and releases it at a running registry.
import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";

import { type Channel, createChannel, createClientFactory, Status } from "nice-grpc";
import { type DeadlineOptions, deadlineMiddleware } from "nice-grpc-client-middleware-deadline";
import { errorDetailsClientMiddleware, ErrorInfo, RichClientError } from "nice-grpc-error-details";

import { type Holder, MissReason } from "../gen/kvlease/v1/lease.js";
import { type RegistryServiceClient, RegistryServiceDefinition } from "../gen/kvlease/v1/registry.js";
import { Engine } from "./engine.js";

const DEADLINE_MS = 5000;
const TENANT = "example-tenant";

type Registry = RegistryServiceClient<DeadlineOptions>;

const randomHex = (size: number): string => randomBytes(size).toString("hex");
const hexId = (leaseId: bigint): string => leaseId.toString(16).padStart(16, "0");
const deadline = (): { deadline: Date } => ({ deadline: new Date(Date.now() + DEADLINE_MS) });

function registryClient(channel: Channel): Registry {
  return createClientFactory()
    .use(errorDetailsClientMiddleware)
    .use(deadlineMiddleware)
    .create(RegistryServiceDefinition, channel);
}

async function main(registryAddress: string, socket: string, serviceConfig: string): Promise<void> {
  const sidecar = createChannel(`unix://${socket}`);
  const channel = createChannel(registryAddress, undefined, {
    "grpc.service_config": readFileSync(serviceConfig, "utf-8"),
  });
  const detached = new AbortController();
  try {
    const engine = new Engine(`typescript-${randomHex(4)}`, randomHex(8));
    await engine.attach(sidecar, detached.signal);
    await converse(registryClient(channel), engine);
  } finally {
    detached.abort();
    sidecar.close();
    channel.close();
  }
}

/** Takes the engine's lease through its life. */
async function converse(registry: Registry, engine: Engine): Promise<void> {
  const { engineId } = engine.holder;
  const leaseId = randomBytes(8).readBigUInt64BE() | 1n;
  await awaitRegistered(registry, engineId);
  console.log(`registered ${engineId}`);
  const watched = changes(registry, leaseId);
  engine.grant(leaseId, TENANT);
  console.log(`granted ${hexId(leaseId)}`);
  await renew(registry, engineId, leaseId);
  await watched.next();
  console.log("watched HELD");
  await pinAndUnpin(registry, engine.holder, leaseId);
  await registry.releaseLease({ leaseId, engineId, tenant: TENANT }, deadline());
  console.log("released");
  await watched.next();
  console.log("watched gone");
  await watched.return(undefined);
  await beRefused(registry);
}

/** Returns once the registry knows the engine. */
async function awaitRegistered(registry: Registry, engineId: string): Promise<void> {
  for await (const response of registry.watchEngines({}, deadline())) {
    if (response.changes.some(({ engine, gone }) => engine?.holder?.engineId === engineId && !gone)) return;
  }
}

/** Yields whether a lease is there whenever that changes: true once it is recorded, then false. */
async function* changes(registry: Registry, leaseId: bigint): AsyncGenerator<boolean> {
  let known = false;
  for await (const response of registry.watchLeases({}, deadline())) {
    for (const change of response.changes) {
      if (change.lease?.leaseId === leaseId && known === change.gone) {
        known = !change.gone;
        yield known;
      }
    }
  }
}

/** Sends one heartbeat, which confirms the lease. Live conversations get one every 5 s. */
async function renew(registry: Registry, engineId: string, leaseId: bigint): Promise<void> {
  async function* beats() {
    yield {
      session: randomHex(8),
      epoch: 1n,
      sequence: 1n,
      full: true,
      engines: [{ engineId, addedLeaseIds: [leaseId] }],
      duration: { seconds: 20n },
      reservation: { seconds: 30n },
    };
  }
  for await (const ack of registry.renewLeases(beats(), deadline())) {
    if (ack.sequence !== 1n || ack.misses.length > 0) throw new Error("the lease was not renewed");
    console.log(`renewed ${hexId(leaseId)}`);
    return;
  }
}

/** Pins the lease for a reader, and ends the pin. Both may be repeated: the pin's id names it. */
async function pinAndUnpin(registry: Registry, holder: Holder, leaseId: bigint): Promise<void> {
  const pinId = randomHex(8);
  const pin = { leaseId, pinId, holder, tenant: TENANT, reservation: { seconds: 30n } };
  const { result } = await registry.pinLease({ pin }, deadline());
  // A miss is an answer, not an error: whoever gets it computes the tokens again.
  if (result?.miss) throw new Error(`missed: ${MissReason[result.miss]}`);
  console.log(`pinned ${result?.tokens} tokens`);
  await registry.unpinLease({ holder, leaseId, pinId }, deadline());
  console.log("unpinned");
}

/** Asks for what cannot be done, and reads the machine readable reason. */
async function beRefused(registry: Registry): Promise<void> {
  try {
    await registry.drainEngine({ engineId: "nobody" }, deadline());
  } catch (error) {
    if (!(error instanceof RichClientError)) throw error;
    for (const detail of error.extra) {
      if (detail.$type === ErrorInfo.$type) {
        console.log(`refused ${Status[error.code]} ${detail.domain} ${detail.reason}`);
      }
    }
  }
}

const [registryAddress, socket, serviceConfig] = process.argv.slice(2);
if (!registryAddress || !socket || !serviceConfig) {
  console.error("usage: main.js REGISTRY SOCKET SERVICE_CONFIG");
  process.exit(2);
}
await main(registryAddress, socket, serviceConfig);
