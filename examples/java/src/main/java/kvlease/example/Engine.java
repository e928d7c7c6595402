package kvlease.example;

import com.google.protobuf.ByteString;
import com.google.protobuf.Duration;
import io.grpc.ManagedChannel;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import java.nio.ByteBuffer;
import java.time.Instant;
import java.util.HashSet;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import kvlease.v1.AttachRequest;
import kvlease.v1.AttachResponse;
import kvlease.v1.ConnectorHello;
import kvlease.v1.ConnectorServiceGrpc;
import kvlease.v1.Holder;
import kvlease.v1.HolderGauges;
import kvlease.v1.KvLayout;
import kvlease.v1.Lease;
import kvlease.v1.LeaseEvents;
import kvlease.v1.LeaseKind;
import kvlease.v1.LeaseMiss;
import kvlease.v1.LeaseOffer;
import kvlease.v1.LeaseState;
import kvlease.v1.MissReason;
import kvlease.v1.PinReply;
import kvlease.v1.PinRequestSpec;
import kvlease.v1.PinResult;
import kvlease.v1.ReleaseCommand;
import kvlease.v1.ReleaseReply;
import kvlease.v1.RenewCommand;
import kvlease.v1.RenewReply;

/**
 * Keeps one lease and answers for it; what the registry knows of it is only a copy. It is attached to a sidecar as
 * a vLLM connector is.
 */
final class Engine implements ClientResponseObserver<AttachRequest, AttachResponse> {
  private static final int BLOCK_SIZE = 16;
  private static final int PROTOCOL_VERSION = 1;
  private static final int PROVISIONAL_S = 6;

  private static final KvLayout LAYOUT =
      KvLayout.newBuilder()
          .setBlockSize(BLOCK_SIZE)
          .setDtype("float32")
          .setTensorParallelSize(1)
          .setPipelineParallelSize(1)
          .setBlockBytes(4096)
          .setLayoutHash("example")
          .build();

  final Holder holder;
  private final CompletableFuture<Void> attached = new CompletableFuture<>();
  private final Set<String> pins = new HashSet<>();
  private ClientCallStreamObserver<AttachRequest> stream;
  private long leaseId;
  private Instant ends = Instant.MIN;

  Engine(String engineId, String bootId) {
    holder = Holder.newBuilder().setEngineId(engineId).setBootId(bootId).setEpoch(1).build();
  }

  /** Registers the engine: it stays registered until it is detached. */
  void attach(ManagedChannel channel) throws Exception {
    ConnectorServiceGrpc.newStub(channel).attach(this);
    send(
        AttachRequest.newBuilder()
            .setHello(
                ConnectorHello.newBuilder()
                    .setProtocolVersion(PROTOCOL_VERSION)
                    .setHolder(holder)
                    .setModel("example")
                    .setLayout(LAYOUT)
                    .setTotalBlocks(64)
                    .setPrefixCaching(true)
                    .setRetain(true)));
    attached.get(Main.DEADLINE_S, TimeUnit.SECONDS);
  }

  synchronized void detach() {
    stream.onCompleted();
  }

  /** Grants a lease. It is provisional, and not recorded, until it is renewed for the first time. */
  synchronized void grant(long granted, String tenant) {
    leaseId = granted;
    ends = Instant.now().plusSeconds(PROVISIONAL_S);
    Lease lease =
        Lease.newBuilder()
            .setLeaseId(leaseId)
            .setKind(LeaseKind.LEASE_KIND_CONVERSATION)
            .setState(LeaseState.LEASE_STATE_HELD)
            .setHolder(holder)
            .setTenant(tenant)
            .setConversationKey(ByteString.copyFrom(ByteBuffer.allocate(8).putLong(leaseId).flip()))
            .setTokens(2 * BLOCK_SIZE)
            .setModel("example")
            .setLayoutHash(LAYOUT.getLayoutHash())
            .build();
    Duration remaining = Duration.newBuilder().setSeconds(PROVISIONAL_S).build();
    send(
        AttachRequest.newBuilder()
            .setOffer(
                LeaseOffer.newBuilder().setLease(lease).setRemaining(remaining).setProvisional(true)));
  }

  @Override
  public void beforeStart(ClientCallStreamObserver<AttachRequest> requests) {
    stream = requests;
  }

  @Override
  public synchronized void onNext(AttachResponse message) {
    switch (message.getMessageCase()) {
      case HELLO -> {
        String refusal = message.getHello().getRefusal();
        if (refusal.isEmpty()) {
          attached.complete(null);
        } else {
          attached.completeExceptionally(new IllegalStateException(refusal));
        }
      }
      case PIN ->
          send(
              AttachRequest.newBuilder()
                  .setPinReply(
                      PinReply.newBuilder()
                          .setCallId(message.getPin().getCallId())
                          .setResult(pin(message.getPin().getPin()))));
      case UNPIN -> pins.remove(message.getUnpin().getPinId());
      case RENEW -> renew(message.getRenew());
      case RELEASE -> release(message.getRelease());
      case READ_COUNTERS ->
          send(
              AttachRequest.newBuilder()
                  .setGauges(
                      HolderGauges.newBuilder().setCallId(message.getReadCounters().getCallId())));
      default -> {} // An order of eviction means nothing to a table of one lease.
    }
  }

  @Override
  public void onError(Throwable error) {
    attached.completeExceptionally(error);
  }

  @Override
  public void onCompleted() {
    attached.completeExceptionally(new IllegalStateException("the sidecar ended the stream"));
  }

  private synchronized void send(AttachRequest.Builder request) {
    stream.onNext(request.build());
  }

  private MissReason miss(long asked) {
    if (asked != leaseId) {
      return MissReason.MISS_REASON_UNKNOWN;
    }
    if (pins.isEmpty() && Instant.now().isAfter(ends)) {
      return MissReason.MISS_REASON_EXPIRED;
    }
    return MissReason.MISS_REASON_UNSPECIFIED;
  }

  private PinResult pin(PinRequestSpec pin) {
    MissReason miss =
        pin.getHolder().equals(holder)
            ? miss(pin.getLeaseId())
            : MissReason.MISS_REASON_HOLDER_CHANGED;
    if (miss != MissReason.MISS_REASON_UNSPECIFIED) {
      return PinResult.newBuilder().setMiss(miss).build();
    }
    pins.add(pin.getPinId());
    return PinResult.newBuilder()
        .setHolder(holder)
        .setTokens(2 * BLOCK_SIZE)
        .setLayoutHash(LAYOUT.getLayoutHash())
        .build();
  }

  private void renew(RenewCommand command) {
    RenewReply.Builder reply = RenewReply.newBuilder().setSequence(command.getSequence());
    for (long asked : command.getLeaseIdsList()) {
      MissReason miss = miss(asked);
      if (miss == MissReason.MISS_REASON_UNSPECIFIED) {
        ends = Instant.now().plusSeconds(command.getDuration().getSeconds());
        tell(asked, LeaseState.LEASE_STATE_HELD, true);
      } else {
        reply.addMisses(LeaseMiss.newBuilder().setLeaseId(asked).setReason(miss));
      }
    }
    send(AttachRequest.newBuilder().setRenewReply(reply));
  }

  private void release(ReleaseCommand command) {
    MissReason miss = miss(command.getLeaseId());
    if (miss == MissReason.MISS_REASON_UNSPECIFIED) {
      // Nobody READs from this engine, so the lease need not drain first.
      leaseId = 0;
      pins.clear();
      tell(command.getLeaseId(), LeaseState.LEASE_STATE_RELEASED, false);
    }
    send(
        AttachRequest.newBuilder()
            .setReleaseReply(
                ReleaseReply.newBuilder().setCallId(command.getCallId()).setMiss(miss)));
  }

  private void tell(long lease, LeaseState state, boolean confirmed) {
    LeaseEvents.Event event =
        LeaseEvents.Event.newBuilder()
            .setLeaseId(lease)
            .setState(state)
            .setConfirmed(confirmed)
            .build();
    send(
        AttachRequest.newBuilder()
            .setEvents(LeaseEvents.newBuilder().setHolder(holder).addEvents(event)));
  }
}
