package kvlease.example;

import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.rpc.ErrorInfo;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusException;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.netty.shaded.io.netty.channel.EventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollDomainSocketChannel;
import io.grpc.netty.shaded.io.netty.channel.epoll.EpollEventLoopGroup;
import io.grpc.netty.shaded.io.netty.channel.unix.DomainSocketAddress;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.BlockingClientCall;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.SecureRandom;
import java.util.HexFormat;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import kvlease.v1.DrainEngineRequest;
import kvlease.v1.EngineRenewals;
import kvlease.v1.Holder;
import kvlease.v1.MissReason;
import kvlease.v1.PinLeaseRequest;
import kvlease.v1.PinRequestSpec;
import kvlease.v1.PinResult;
import kvlease.v1.RegistryServiceGrpc;
import kvlease.v1.RegistryServiceGrpc.RegistryServiceBlockingV2Stub;
import kvlease.v1.ReleaseLeaseRequest;
import kvlease.v1.RenewLeasesRequest;
import kvlease.v1.RenewLeasesResponse;
import kvlease.v1.UnpinLeaseRequest;
import kvlease.v1.WatchEnginesRequest;
import kvlease.v1.WatchEnginesResponse;
import kvlease.v1.WatchLeasesRequest;
import kvlease.v1.WatchLeasesResponse;

/** Registers an engine, grants a lease, renews, pins, watches and releases it at a running registry. */
public final class Main {
  static final int DEADLINE_S = 5;
  private static final String TENANT = "example-tenant";
  private static final SecureRandom RANDOM = new SecureRandom();

  private final RegistryServiceBlockingV2Stub stub;

  private Main(ManagedChannel channel) {
    stub = RegistryServiceGrpc.newBlockingV2Stub(channel);
  }

  public static void main(String[] arguments) throws Exception {
    if (arguments.length != 3) {
      System.err.println("usage: kvlease-example REGISTRY SOCKET SERVICE_CONFIG");
      System.exit(2);
    }
    Map<String, ?> serviceConfig =
        new Gson().fromJson(Files.readString(Path.of(arguments[2])), Map.class);
    EventLoopGroup loops = new EpollEventLoopGroup(1);
    ManagedChannel sidecar =
        NettyChannelBuilder.forAddress(new DomainSocketAddress(arguments[1]))
            .eventLoopGroup(loops)
            .channelType(EpollDomainSocketChannel.class)
            .usePlaintext()
            .build();
    ManagedChannel channel =
        Grpc.newChannelBuilder(arguments[0], InsecureChannelCredentials.create())
            .defaultServiceConfig(serviceConfig)
            .build();
    try {
      Engine engine = new Engine("java-" + randomHex(4), randomHex(8));
      engine.attach(sidecar);
      new Main(channel).converse(engine);
      engine.detach();
    } finally {
      channel.shutdownNow();
      sidecar.shutdown().awaitTermination(DEADLINE_S, TimeUnit.SECONDS);
      loops.shutdownGracefully(0, DEADLINE_S, TimeUnit.SECONDS);
    }
  }

  /** Takes the engine's lease through its life. */
  private void converse(Engine engine) throws Exception {
    String engineId = engine.holder.getEngineId();
    long leaseId = RANDOM.nextLong() | 1;
    awaitRegistered(engine.holder);
    System.out.println("registered " + engineId);
    try (Watch watch = new Watch(leaseId)) {
      engine.grant(leaseId, TENANT);
      System.out.printf("granted %016x%n", leaseId);
      renew(engineId, leaseId);
      watch.await(false);
      System.out.println("watched HELD");
      pinAndUnpin(engine.holder, leaseId);
      registry()
          .releaseLease(
              ReleaseLeaseRequest.newBuilder()
                  .setLeaseId(leaseId)
                  .setEngineId(engineId)
                  .setTenant(TENANT)
                  .build());
      System.out.println("released");
      watch.await(true);
      System.out.println("watched gone");
    }
    beRefused();
  }

  /** The registry; every call has its deadline. */
  private RegistryServiceBlockingV2Stub registry() {
    return stub.withDeadlineAfter(DEADLINE_S, TimeUnit.SECONDS);
  }

  /** Returns once the registry knows the engine. */
  private void awaitRegistered(Holder holder) throws Exception {
    BlockingClientCall<?, WatchEnginesResponse> watch =
        registry().watchEngines(WatchEnginesRequest.getDefaultInstance());
    try {
      for (WatchEnginesResponse response; (response = watch.read()) != null; ) {
        boolean there =
            response.getChangesList().stream()
                .anyMatch(change -> !change.getGone() && change.getEngine().getHolder().equals(holder));
        if (there) {
          return;
        }
      }
      throw new IllegalStateException("the watch of engines ended");
    } finally {
      watch.cancel("seen enough", null);
    }
  }

  /** Tells what becomes of one lease. */
  private final class Watch implements AutoCloseable {
    private final long leaseId;
    private final BlockingClientCall<?, WatchLeasesResponse> call =
        registry().watchLeases(WatchLeasesRequest.getDefaultInstance());

    Watch(long leaseId) {
      this.leaseId = leaseId;
    }

    /** Returns once the lease is recorded, or gone. */
    void await(boolean gone) throws Exception {
      for (WatchLeasesResponse response; (response = call.read()) != null; ) {
        boolean told =
            response.getChangesList().stream()
                .anyMatch(change -> change.getLease().getLeaseId() == leaseId && change.getGone() == gone);
        if (told) {
          return;
        }
      }
      throw new IllegalStateException("the watch of leases ended");
    }

    @Override
    public void close() {
      call.cancel("seen enough", null);
    }
  }

  /** Sends one heartbeat, which confirms the lease. Live conversations get one every 5 s. */
  private void renew(String engineId, long leaseId) throws Exception {
    BlockingClientCall<RenewLeasesRequest, RenewLeasesResponse> beats = registry().renewLeases();
    beats.write(
        RenewLeasesRequest.newBuilder()
            .setSession(randomHex(8))
            .setEpoch(1)
            .setSequence(1)
            .setFull(true)
            .addEngines(EngineRenewals.newBuilder().setEngineId(engineId).addAddedLeaseIds(leaseId))
            .setDuration(Duration.newBuilder().setSeconds(20))
            .setReservation(Duration.newBuilder().setSeconds(30))
            .build());
    RenewLeasesResponse ack = beats.read();
    beats.cancel("one beat is enough here", null);
    if (ack == null || ack.getSequence() != 1 || ack.getMissesCount() > 0) {
      throw new IllegalStateException("the lease was not renewed: " + ack);
    }
    System.out.printf("renewed %016x%n", leaseId);
  }

  /** Pins the lease for a reader, and ends the pin. Both may be repeated: the pin's id names it. */
  private void pinAndUnpin(Holder holder, long leaseId) throws Exception {
    String pinId = randomHex(8);
    PinRequestSpec pin =
        PinRequestSpec.newBuilder()
            .setLeaseId(leaseId)
            .setPinId(pinId)
            .setHolder(holder)
            .setReservation(Duration.newBuilder().setSeconds(30))
            .setTenant(TENANT)
            .build();
    PinResult result =
        registry().pinLease(PinLeaseRequest.newBuilder().setPin(pin).build()).getResult();
    // A miss is an answer, not an error: whoever gets it computes the tokens again.
    if (result.getMiss() != MissReason.MISS_REASON_UNSPECIFIED) {
      throw new IllegalStateException("missed: " + result.getMiss());
    }
    System.out.println("pinned " + result.getTokens() + " tokens");
    registry()
        .unpinLease(
            UnpinLeaseRequest.newBuilder()
                .setHolder(holder)
                .setLeaseId(leaseId)
                .setPinId(pinId)
                .build());
    System.out.println("unpinned");
  }

  /** Asks for what cannot be done, and reads the machine readable reason. */
  private void beRefused() throws Exception {
    try {
      registry().drainEngine(DrainEngineRequest.newBuilder().setEngineId("nobody").build());
    } catch (StatusException error) {
      for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          ErrorInfo info = detail.unpack(ErrorInfo.class);
          System.out.printf(
              "refused %s %s %s%n", error.getStatus().getCode(), info.getDomain(), info.getReason());
        }
      }
    }
  }

  private static String randomHex(int size) {
    byte[] bytes = new byte[size];
    RANDOM.nextBytes(bytes);
    return HexFormat.of().formatHex(bytes);
  }
}
