//! The engine's side: a table of one lease, attached to a sidecar as a vLLM connector is.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;
use tonic::Streaming;

use crate::kvlease::attach_request::Message as Say;
use crate::kvlease::attach_response::Message as Hear;
use crate::kvlease::connector_service_client::ConnectorServiceClient;
use crate::kvlease::lease_events::Event;
use crate::kvlease::{
    AttachRequest, AttachResponse, ConnectorHello, Holder, HolderGauges, KvLayout, Lease, LeaseEvents,
    LeaseKind, LeaseMiss, LeaseOffer, LeaseState, MissReason, PinReply, PinRequestSpec, PinResult,
    ReleaseCommand, ReleaseReply, RenewCommand, RenewReply,
};
use crate::Failure;

const BLOCK_SIZE: u32 = 16;
const PROTOCOL_VERSION: u32 = 1;
const PROVISIONAL: Duration = Duration::from_secs(6);

/// A lease to grant: its id and the tenant that it belongs to.
pub type Grant = (u64, String);

/// Keeps one lease and answers for it; what the registry knows of it is only a copy.
pub struct Engine {
    holder: Holder,
    lease_id: Option<u64>,
    ends: Instant,
    pins: HashSet<String>,
    outbox: mpsc::UnboundedSender<AttachRequest>,
}

impl Engine {
    /// Registers an engine, which grants what it receives until the sender of grants is dropped; then it is
    /// registered no longer.
    pub async fn attach(
        holder: Holder,
        channel: Channel,
        grants: mpsc::Receiver<Grant>,
    ) -> Result<(), Failure> {
        let (outbox, requests) = mpsc::unbounded_channel();
        let engine = Engine { holder, lease_id: None, ends: Instant::now(), pins: HashSet::new(), outbox };
        engine.say(Say::Hello(ConnectorHello {
            protocol_version: PROTOCOL_VERSION,
            holder: Some(engine.holder.clone()),
            model: "example".into(),
            layout: Some(layout()),
            total_blocks: 64,
            prefix_caching: true,
            retain: true,
            ..Default::default()
        }));
        let mut responses = ConnectorServiceClient::new(channel)
            .attach(UnboundedReceiverStream::new(requests))
            .await?
            .into_inner();
        match responses.message().await?.and_then(|first| first.message) {
            Some(Hear::Hello(hello)) if hello.refusal.is_empty() => {}
            other => return Err(format!("the sidecar refused the engine: {other:?}").into()),
        }
        tokio::spawn(engine.serve(responses, grants));
        Ok(())
    }

    async fn serve(mut self, mut responses: Streaming<AttachResponse>, mut grants: mpsc::Receiver<Grant>) {
        loop {
            tokio::select! {
                grant = grants.recv() => match grant {
                    Some((lease_id, tenant)) => self.grant(lease_id, tenant),
                    None => return,
                },
                response = responses.message() => match response {
                    Ok(Some(AttachResponse { message: Some(message) })) => self.answer(message),
                    Ok(Some(_)) => {} // A message of a later version.
                    Ok(None) | Err(_) => return,
                },
            }
        }
    }

    /// Grants a lease. It is provisional, and not recorded, until it is renewed for the first time.
    fn grant(&mut self, lease_id: u64, tenant: String) {
        self.lease_id = Some(lease_id);
        self.ends = Instant::now() + PROVISIONAL;
        self.say(Say::Offer(LeaseOffer {
            lease: Some(Lease {
                lease_id,
                kind: LeaseKind::Conversation.into(),
                state: LeaseState::Held.into(),
                holder: Some(self.holder.clone()),
                tenant,
                conversation_key: lease_id.to_be_bytes().to_vec(),
                tokens: u64::from(2 * BLOCK_SIZE),
                model: "example".into(),
                layout_hash: layout().layout_hash,
                ..Default::default()
            }),
            remaining: PROVISIONAL.try_into().ok(),
            provisional: true,
            ..Default::default()
        }));
    }

    /// A broken stream is left to the reader, which ends then.
    fn say(&self, message: Say) {
        let _ = self.outbox.send(AttachRequest { message: Some(message) });
    }

    fn answer(&mut self, message: Hear) {
        match message {
            Hear::Pin(command) => {
                let result = self.pin(command.pin.unwrap_or_default());
                self.say(Say::PinReply(PinReply { call_id: command.call_id, result: Some(result) }));
            }
            Hear::Unpin(command) => {
                self.pins.remove(&command.pin_id);
            }
            Hear::Renew(command) => self.renew(command),
            Hear::Release(command) => self.release(command),
            Hear::ReadCounters(question) => {
                self.say(Say::Gauges(HolderGauges { call_id: question.call_id, ..Default::default() }));
            }
            _ => {} // An order of eviction means nothing to a table of one lease.
        }
    }

    fn miss(&self, lease_id: u64) -> MissReason {
        if self.lease_id != Some(lease_id) {
            MissReason::Unknown
        } else if self.pins.is_empty() && Instant::now() >= self.ends {
            MissReason::Expired
        } else {
            MissReason::Unspecified
        }
    }

    fn pin(&mut self, pin: PinRequestSpec) -> PinResult {
        let miss = if pin.holder.as_ref() == Some(&self.holder) {
            self.miss(pin.lease_id)
        } else {
            MissReason::HolderChanged
        };
        if miss != MissReason::Unspecified {
            return PinResult { miss: miss.into(), ..Default::default() };
        }
        self.pins.insert(pin.pin_id);
        PinResult {
            holder: Some(self.holder.clone()),
            tokens: u64::from(2 * BLOCK_SIZE),
            layout_hash: layout().layout_hash,
            ..Default::default()
        }
    }

    fn renew(&mut self, command: RenewCommand) {
        let duration = command.duration.and_then(|duration| duration.try_into().ok());
        let mut misses = Vec::new();
        for lease_id in command.lease_ids {
            match self.miss(lease_id) {
                MissReason::Unspecified => {
                    self.ends = Instant::now() + duration.unwrap_or_default();
                    self.tell(Event { lease_id, state: LeaseState::Held.into(), confirmed: true });
                }
                miss => misses.push(LeaseMiss { lease_id, reason: miss.into() }),
            }
        }
        self.say(Say::RenewReply(RenewReply { sequence: command.sequence, misses }));
    }

    fn release(&mut self, ReleaseCommand { call_id, lease_id, .. }: ReleaseCommand) {
        let miss = self.miss(lease_id);
        if miss == MissReason::Unspecified {
            // Nobody READs from this engine, so the lease need not drain first.
            self.lease_id = None;
            self.pins.clear();
            self.tell(Event { lease_id, state: LeaseState::Released.into(), confirmed: false });
        }
        self.say(Say::ReleaseReply(ReleaseReply { call_id, miss: miss.into() }));
    }

    fn tell(&self, event: Event) {
        self.say(Say::Events(LeaseEvents { events: vec![event], holder: Some(self.holder.clone()) }));
    }
}

fn layout() -> KvLayout {
    KvLayout {
        block_size: BLOCK_SIZE,
        dtype: "float32".into(),
        tensor_parallel_size: 1,
        pipeline_parallel_size: 1,
        block_bytes: 4096,
        layout_hash: "example".into(),
    }
}
