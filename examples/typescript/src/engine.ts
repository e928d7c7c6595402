import { PassThrough } from "node:stream";

import { type Channel, createClient } from "nice-grpc";

import {
  type AttachRequest,
  type AttachResponse,
  ConnectorServiceDefinition,
  type DeepPartial,
  type ReleaseCommand,
  type RenewCommand,
} from "../gen/kvlease/v1/connector.js";
import {
  type Holder,
  type KvLayout,
  LeaseKind,
  LeaseState,
  MissReason,
  type PinRequestSpec,
  type PinResult,
} from "../gen/kvlease/v1/lease.js";

const BLOCK_SIZE = 16;
const PROTOCOL_VERSION = 1;
const PROVISIONAL_S = 6;

type Message = NonNullable<DeepPartial<AttachRequest>["message"]>;

/**
 * Keeps one lease and answers for it; what the registry knows of it is only a copy.
 * It is attached to a sidecar as a vLLM connector is.
 */
export class Engine {
  readonly holder: Holder;
  private readonly layout: KvLayout = {
    blockSize: BLOCK_SIZE,
    dtype: "float32",
    tensorParallelSize: 1,
    pipelineParallelSize: 1,
    blockBytes: 4096n,
    layoutHash: "example",
  };
  private readonly outbox = new PassThrough({ objectMode: true });
  private readonly pins = new Set<string>();
  private leaseId = 0n;
  private endsMs = 0;

  constructor(engineId: string, bootId: string) {
    this.holder = { engineId, bootId, epoch: 1n };
  }

  /** Registers the engine: it stays registered until the signal aborts. */
  async attach(channel: Channel, signal: AbortSignal): Promise<void> {
    this.send({
      $case: "hello",
      value: {
        protocolVersion: PROTOCOL_VERSION,
        holder: this.holder,
        model: "example",
        layout: this.layout,
        totalBlocks: 64n,
        prefixCaching: true,
        retain: true,
      },
    });
    const client = createClient(ConnectorServiceDefinition, channel);
    const responses = client.attach(this.outbox, { signal })[Symbol.asyncIterator]();
    const first = await responses.next();
    const hello = first.value?.message;
    if (hello?.$case !== "hello" || hello.value.refusal) {
      throw new Error(`the sidecar refused the engine: ${JSON.stringify(hello)}`);
    }
    void this.serve(responses);
  }

  /** Grants a lease. It is provisional, and not recorded, until it is renewed for the first time. */
  grant(leaseId: bigint, tenant: string): void {
    this.leaseId = leaseId;
    this.endsMs = performance.now() + PROVISIONAL_S * 1000;
    const conversationKey = Buffer.alloc(8);
    conversationKey.writeBigUInt64BE(leaseId);
    const lease = {
      leaseId,
      kind: LeaseKind.CONVERSATION,
      state: LeaseState.HELD,
      holder: this.holder,
      tenant,
      conversationKey,
      tokens: BigInt(2 * BLOCK_SIZE),
      model: "example",
      layoutHash: this.layout.layoutHash,
    };
    const remaining = { seconds: BigInt(PROVISIONAL_S), nanos: 0 };
    this.send({ $case: "offer", value: { lease, remaining, provisional: true } });
  }

  private send(message: Message): void {
    this.outbox.write({ message });
  }

  private async serve(responses: AsyncIterator<AttachResponse>): Promise<void> {
    try {
      for (let next = await responses.next(); !next.done; next = await responses.next()) {
        this.answer(next.value.message);
      }
    } catch {
      // The stream broke or was aborted: the engine is registered no longer.
    }
  }

  private answer(message: AttachResponse["message"]): void {
    switch (message?.$case) {
      case "pin": {
        const { callId, pin } = message.value;
        this.send({ $case: "pinReply", value: { callId, result: this.pin(pin!) } });
        break;
      }
      case "unpin":
        this.pins.delete(message.value.pinId);
        break;
      case "renew":
        this.renew(message.value);
        break;
      case "release":
        this.release(message.value);
        break;
      case "readCounters":
        this.send({ $case: "gauges", value: { callId: message.value.callId } });
        break;
      default: // An order of eviction means nothing to a table of one lease.
    }
  }

  private miss(leaseId: bigint): MissReason {
    if (leaseId !== this.leaseId) return MissReason.UNKNOWN;
    if (this.pins.size === 0 && performance.now() >= this.endsMs) return MissReason.EXPIRED;
    return MissReason.UNSPECIFIED;
  }

  private pin(pin: PinRequestSpec): DeepPartial<PinResult> {
    const { engineId, bootId, epoch } = this.holder;
    const asked = pin.holder;
    if (asked?.engineId !== engineId || asked.bootId !== bootId || asked.epoch !== epoch) {
      return { miss: MissReason.HOLDER_CHANGED };
    }
    const miss = this.miss(pin.leaseId);
    if (miss) return { miss };
    this.pins.add(pin.pinId);
    return { holder: this.holder, tokens: BigInt(2 * BLOCK_SIZE), layoutHash: this.layout.layoutHash };
  }

  private renew(command: RenewCommand): void {
    const misses: { leaseId: bigint; reason: MissReason }[] = [];
    for (const leaseId of command.leaseIds) {
      const reason = this.miss(leaseId);
      if (reason) {
        misses.push({ leaseId, reason });
      } else {
        this.endsMs = performance.now() + Number(command.duration?.seconds ?? 0n) * 1000;
        this.tell({ leaseId, state: LeaseState.HELD, confirmed: true });
      }
    }
    this.send({ $case: "renewReply", value: { sequence: command.sequence, misses } });
  }

  private release({ callId, leaseId }: ReleaseCommand): void {
    const miss = this.miss(leaseId);
    if (!miss) {
      // Nobody READs from this engine, so the lease need not drain first.
      this.leaseId = 0n;
      this.pins.clear();
      this.tell({ leaseId, state: LeaseState.RELEASED });
    }
    this.send({ $case: "releaseReply", value: { callId, miss } });
  }

  private tell(event: { leaseId: bigint; state: LeaseState; confirmed?: boolean }): void {
    this.send({ $case: "events", value: { holder: this.holder, events: [event] } });
  }
}
