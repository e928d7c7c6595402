//! Registers an engine, grants a lease, renews, pins, watches and releases it at a running registry.

mod engine;
mod retry;

#[allow(clippy::all)]
mod kvlease {
    tonic::include_proto!("kvlease.v1");
}

use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Streaming};
use tonic_types::StatusExt;

use engine::Engine;
use kvlease::registry_service_client::RegistryServiceClient;
use kvlease::{
    DrainEngineRequest, EngineRenewals, Holder, MissReason, PinLeaseRequest, PinRequestSpec,
    ReleaseLeaseRequest, RenewLeasesRequest, UnpinLeaseRequest, WatchEnginesRequest, WatchLeasesRequest,
    WatchLeasesResponse,
};
use retry::RetryPolicy;

const DEADLINE: Duration = Duration::from_secs(5);
const TENANT: &str = "example-tenant";

type Failure = Box<dyn std::error::Error>;
type Registry = RegistryServiceClient<Channel>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [registry, socket, service_config] = arguments.as_slice() else {
        return Err("usage: kvlease-example REGISTRY SOCKET SERVICE_CONFIG".into());
    };
    let retry = RetryPolicy::from_file(service_config)?;
    let channel = Endpoint::from_shared(format!("http://{registry}"))?.connect().await?;
    let holder = Holder {
        engine_id: format!("rust-{:08x}", rand::random::<u32>()),
        boot_id: format!("{:016x}", rand::random::<u64>()),
        epoch: 1,
    };
    let (grants, granted) = mpsc::channel(1);
    Engine::attach(holder.clone(), unix_channel(socket.clone()).await?, granted).await?;
    converse(RegistryServiceClient::new(channel), &retry, holder, grants).await
}

async fn unix_channel(socket: String) -> Result<Channel, Failure> {
    // The URI is never used: the connector knows the socket.
    let connect = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Ok(Endpoint::from_static("http://localhost").connect_with_connector(connect).await?)
}

/// Takes the engine's lease through its life.
async fn converse(
    mut registry: Registry,
    retry: &RetryPolicy,
    holder: Holder,
    grants: mpsc::Sender<engine::Grant>,
) -> Result<(), Failure> {
    timeout(DEADLINE, await_registered(&mut registry, &holder)).await??;
    println!("registered {}", holder.engine_id);
    let lease_id = rand::random::<u64>() | 1;
    let mut watch = registry.watch_leases(WatchLeasesRequest {}).await?.into_inner();
    grants.send((lease_id, TENANT.to_string())).await?;
    println!("granted {lease_id:016x}");
    timeout(DEADLINE, renew(&mut registry, &holder, lease_id)).await??;
    timeout(DEADLINE, await_change(&mut watch, lease_id, false)).await??;
    println!("watched HELD");
    pin_and_unpin(&registry, retry, &holder, lease_id).await?;
    release(&registry, retry, &holder, lease_id).await?;
    timeout(DEADLINE, await_change(&mut watch, lease_id, true)).await??;
    println!("watched gone");
    be_refused(&registry, retry).await
}

/// Returns once the registry knows the engine.
async fn await_registered(registry: &mut Registry, holder: &Holder) -> Result<(), Failure> {
    let mut watch = registry.watch_engines(WatchEnginesRequest {}).await?.into_inner();
    while let Some(response) = watch.message().await? {
        let mut there = response.changes.iter().filter(|change| !change.gone);
        if there.any(|change| change.engine.as_ref().and_then(|e| e.holder.as_ref()) == Some(holder)) {
            return Ok(());
        }
    }
    Err("the watch of engines ended".into())
}

/// Returns once the lease is recorded, or gone.
async fn await_change(
    watch: &mut Streaming<WatchLeasesResponse>,
    lease_id: u64,
    gone: bool,
) -> Result<(), Failure> {
    while let Some(response) = watch.message().await? {
        let mut changes = response.changes.iter().filter(|change| change.gone == gone);
        if changes.any(|change| change.lease.as_ref().is_some_and(|lease| lease.lease_id == lease_id)) {
            return Ok(());
        }
    }
    Err("the watch of leases ended".into())
}

/// Sends one heartbeat, which confirms the lease. Live conversations get one every 5 s.
async fn renew(registry: &mut Registry, holder: &Holder, lease_id: u64) -> Result<(), Failure> {
    let beat = RenewLeasesRequest {
        session: format!("{:016x}", rand::random::<u64>()),
        epoch: 1,
        sequence: 1,
        full: true,
        engines: vec![EngineRenewals {
            engine_id: holder.engine_id.clone(),
            added_lease_ids: vec![lease_id],
            ..Default::default()
        }],
        duration: Some(Duration::from_secs(20).try_into()?),
        reservation: Some(Duration::from_secs(30).try_into()?),
    };
    let mut acks = registry.renew_leases(Request::new(tokio_stream::once(beat))).await?.into_inner();
    let ack = acks.message().await?.ok_or("no answer to the heartbeat")?;
    if ack.sequence != 1 || !ack.misses.is_empty() {
        return Err(format!("the lease was not renewed: {ack:?}").into());
    }
    println!("renewed {lease_id:016x}");
    Ok(())
}

/// Pins the lease for a reader, and ends the pin. Both may be repeated: the pin's id names it.
async fn pin_and_unpin(
    registry: &Registry,
    retry: &RetryPolicy,
    holder: &Holder,
    lease_id: u64,
) -> Result<(), Failure> {
    let pin_id = format!("{:016x}", rand::random::<u64>());
    let pin = PinRequestSpec {
        lease_id,
        pin_id: pin_id.clone(),
        holder: Some(holder.clone()),
        reservation: Some(Duration::from_secs(30).try_into()?),
        tenant: TENANT.into(),
        ..Default::default()
    };
    let call = |request| {
        let mut registry = registry.clone();
        async move { registry.pin_lease(request).await }
    };
    let answer = retry.call(PinLeaseRequest { pin: Some(pin) }, call).await?;
    let result = answer.result.unwrap_or_default();
    // A miss is an answer, not an error: whoever gets it computes the tokens again.
    if result.miss() != MissReason::Unspecified {
        return Err(format!("missed: {}", result.miss().as_str_name()).into());
    }
    println!("pinned {} tokens", result.tokens);
    let unpin = UnpinLeaseRequest { holder: Some(holder.clone()), lease_id, pin_id };
    let call = |request| {
        let mut registry = registry.clone();
        async move { registry.unpin_lease(request).await }
    };
    retry.call(unpin, call).await?;
    println!("unpinned");
    Ok(())
}

/// Ends the lease for its tenant.
async fn release(
    registry: &Registry,
    retry: &RetryPolicy,
    holder: &Holder,
    lease_id: u64,
) -> Result<(), Failure> {
    let engine_id = holder.engine_id.clone();
    let request = ReleaseLeaseRequest { lease_id, engine_id, tenant: TENANT.into() };
    let call = |request| {
        let mut registry = registry.clone();
        async move { registry.release_lease(request).await }
    };
    retry.call(request, call).await?;
    println!("released");
    Ok(())
}

/// Asks for what cannot be done, and reads the machine readable reason.
async fn be_refused(registry: &Registry, retry: &RetryPolicy) -> Result<(), Failure> {
    let request = DrainEngineRequest { engine_id: "nobody".into(), undo: false };
    let call = |request| {
        let mut registry = registry.clone();
        async move { registry.drain_engine(request).await }
    };
    let Err(status) = retry.call(request, call).await else {
        return Err("not refused".into());
    };
    let info = status.get_details_error_info().ok_or("refused without a reason")?;
    println!("refused {} {} {}", status_name(status.code()), info.domain, info.reason);
    Ok(())
}

/// The code as the protocol spells it: NOT_FOUND, not NotFound.
fn status_name(code: tonic::Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(letter.to_uppercase());
    }
    name
}
