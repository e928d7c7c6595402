// Registers an engine, grants a lease, renews, pins, watches and releases it at a running registry.
package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	kvleasev1 "kvlease.example/go/gen/kvlease/v1"
)

const (
	deadline = 5 * time.Second
	tenant   = "example-tenant"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: example REGISTRY SOCKET SERVICE_CONFIG")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(registryAddress, socket, serviceConfigFile string) error {
	serviceConfig, err := os.ReadFile(serviceConfigFile)
	if err != nil {
		return err
	}
	sidecar, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer sidecar.Close()
	connection, err := grpc.NewClient(registryAddress,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(string(serviceConfig)))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	engine := NewEngine("go-"+randomHex(4), randomHex(8))
	if err := engine.Attach(ctx, sidecar); err != nil {
		return err
	}
	return converse(ctx, kvleasev1.NewRegistryServiceClient(connection), engine)
}

// converse takes the engine's lease through its life.
func converse(ctx context.Context, registry kvleasev1.RegistryServiceClient, engine *Engine) error {
	if err := awaitRegistered(ctx, registry, engine.holder); err != nil {
		return err
	}
	fmt.Println("registered", engine.holder.EngineId)
	leaseID := randomID()
	watch, err := watchLease(ctx, registry, leaseID)
	if err != nil {
		return err
	}
	engine.Grant(leaseID, tenant)
	fmt.Printf("granted %016x\n", leaseID)
	for _, step := range []func() error{
		func() error { return renew(ctx, registry, engine.holder.EngineId, leaseID) },
		func() error { return watch(true) },
		func() error { return pinAndUnpin(ctx, registry, engine.holder, leaseID) },
		func() error { return release(ctx, registry, engine.holder.EngineId, leaseID) },
		func() error { return watch(false) },
		func() error { return beRefused(ctx, registry) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// awaitRegistered returns once the registry knows the engine.
func awaitRegistered(ctx context.Context, registry kvleasev1.RegistryServiceClient, holder *kvleasev1.Holder) error {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	stream, err := registry.WatchEngines(ctx, &kvleasev1.WatchEnginesRequest{})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, change := range response.Changes {
			if proto.Equal(change.Engine.Holder, holder) && !change.Gone {
				return nil
			}
		}
	}
}

// watchLease returns a function that waits until the lease is recorded, or gone.
func watchLease(ctx context.Context, registry kvleasev1.RegistryServiceClient, leaseID uint64) (func(bool) error, error) {
	stream, err := registry.WatchLeases(ctx, &kvleasev1.WatchLeasesRequest{})
	if err != nil {
		return nil, err
	}
	changes, broken := make(chan bool, 16), make(chan error, 1)
	go func() {
		for {
			response, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			for _, change := range response.Changes {
				if change.Lease.LeaseId == leaseID {
					changes <- !change.Gone
				}
			}
		}
	}()
	return func(there bool) error {
		bound := time.After(deadline)
		for {
			select {
			case is := <-changes:
				if is == there {
					fmt.Println("watched", map[bool]string{true: "HELD", false: "gone"}[there])
					return nil
				}
			case err := <-broken:
				return err
			case <-bound:
				return fmt.Errorf("the watch did not tell of the lease within %s", deadline)
			}
		}
	}, nil
}

// renew sends one heartbeat, which confirms the lease. Live conversations get one every 5 s.
func renew(ctx context.Context, registry kvleasev1.RegistryServiceClient, engineID string, leaseID uint64) error {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	stream, err := registry.RenewLeases(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(&kvleasev1.RenewLeasesRequest{
		Session: randomHex(8), Epoch: 1, Sequence: 1, Full: true,
		Engines:     []*kvleasev1.EngineRenewals{{EngineId: engineID, AddedLeaseIds: []uint64{leaseID}}},
		Duration:    durationpb.New(20 * time.Second),
		Reservation: durationpb.New(30 * time.Second),
	}); err != nil {
		return err
	}
	ack, err := stream.Recv()
	if err != nil {
		return err
	}
	if ack.Sequence != 1 || len(ack.Misses) > 0 {
		return fmt.Errorf("the lease was not renewed: %v", ack)
	}
	fmt.Printf("renewed %016x\n", leaseID)
	return nil
}

// pinAndUnpin pins the lease for a reader, and ends the pin. Both may be repeated: the pin's id names it.
func pinAndUnpin(ctx context.Context, registry kvleasev1.RegistryServiceClient, holder *kvleasev1.Holder, leaseID uint64) error {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	pinID := randomHex(8)
	answer, err := registry.PinLease(ctx, &kvleasev1.PinLeaseRequest{Pin: &kvleasev1.PinRequestSpec{
		LeaseId: leaseID, PinId: pinID, Holder: holder, Tenant: tenant,
		Reservation: durationpb.New(30 * time.Second),
	}})
	if err != nil {
		return err
	}
	// A miss is an answer, not an error: whoever gets it computes the tokens again.
	if miss := answer.Result.Miss; miss != kvleasev1.MissReason_MISS_REASON_UNSPECIFIED {
		return fmt.Errorf("missed: %s", miss)
	}
	fmt.Println("pinned", answer.Result.Tokens, "tokens")
	if _, err := registry.UnpinLease(ctx, &kvleasev1.UnpinLeaseRequest{
		Holder: holder, LeaseId: leaseID, PinId: pinID,
	}); err != nil {
		return err
	}
	fmt.Println("unpinned")
	return nil
}

// release ends the lease for its tenant.
func release(ctx context.Context, registry kvleasev1.RegistryServiceClient, engineID string, leaseID uint64) error {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	_, err := registry.ReleaseLease(ctx, &kvleasev1.ReleaseLeaseRequest{
		LeaseId: leaseID, EngineId: engineID, Tenant: tenant,
	})
	if err == nil {
		fmt.Println("released")
	}
	return err
}

// beRefused asks for what cannot be done, and reads the machine readable reason.
func beRefused(ctx context.Context, registry kvleasev1.RegistryServiceClient) error {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	_, err := registry.DrainEngine(ctx, &kvleasev1.DrainEngineRequest{EngineId: "nobody"})
	refusal, ok := status.FromError(err)
	if err == nil || !ok {
		return fmt.Errorf("not refused: %v", err)
	}
	for _, detail := range refusal.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			fmt.Println("refused", statusName(refusal), info.Domain, info.Reason)
		}
	}
	return nil
}

// statusName is the code as the protocol spells it: NOT_FOUND, not NotFound.
func statusName(refusal *status.Status) string {
	name := []byte{}
	for index, letter := range []byte(refusal.Code().String()) {
		if index > 0 && letter >= 'A' && letter <= 'Z' {
			name = append(name, '_')
		}
		name = append(name, letter&^0x20)
	}
	return string(name)
}

func randomHex(size int) string {
	bytes := make([]byte, size)
	rand.Read(bytes)
	return hex.EncodeToString(bytes)
}

func randomID() uint64 {
	bytes := make([]byte, 8)
	rand.Read(bytes)
	return binary.BigEndian.Uint64(bytes) | 1
}
