package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	kvleasev1 "kvlease.example/go/gen/kvlease/v1"
)

const (
	blockSize       = 16
	protocolVersion = 1
	provisional     = 6 * time.Second
)

// Engine keeps one lease and answers for it; what the registry knows of it is only a copy.
// It is attached to a sidecar as a vLLM connector is.
type Engine struct {
	holder *kvleasev1.Holder
	layout *kvleasev1.KvLayout
	stream grpc.BidiStreamingClient[kvleasev1.AttachRequest, kvleasev1.AttachResponse]

	mutex sync.Mutex // guards what follows, and sends on the stream
	lease *kvleasev1.Lease
	ends  time.Time
	pins  map[string]bool
}

// NewEngine returns an engine that is not attached yet.
func NewEngine(engineID, bootID string) *Engine {
	return &Engine{
		holder: &kvleasev1.Holder{EngineId: engineID, BootId: bootID, Epoch: 1},
		layout: &kvleasev1.KvLayout{
			BlockSize: blockSize, Dtype: "float32", TensorParallelSize: 1, PipelineParallelSize: 1,
			BlockBytes: 4096, LayoutHash: "example",
		},
		pins: map[string]bool{},
	}
}

// Attach registers the engine: it stays registered until ctx is done.
func (engine *Engine) Attach(ctx context.Context, connection *grpc.ClientConn) error {
	stream, err := kvleasev1.NewConnectorServiceClient(connection).Attach(ctx)
	if err != nil {
		return err
	}
	engine.stream = stream
	engine.send(&kvleasev1.AttachRequest{Message: &kvleasev1.AttachRequest_Hello{Hello: &kvleasev1.ConnectorHello{
		ProtocolVersion: protocolVersion, Holder: engine.holder, Model: "example", Layout: engine.layout,
		TotalBlocks: 64, PrefixCaching: true, Retain: true,
	}}})
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if refusal := first.GetHello().GetRefusal(); refusal != "" {
		return fmt.Errorf("the sidecar refused the engine: %s", refusal)
	}
	go engine.serve()
	return nil
}

// Grant grants a lease. It is provisional, and not recorded, until it is renewed for the first time.
func (engine *Engine) Grant(leaseID uint64, tenant string) {
	engine.mutex.Lock()
	defer engine.mutex.Unlock()
	engine.lease = &kvleasev1.Lease{
		LeaseId: leaseID, Kind: kvleasev1.LeaseKind_LEASE_KIND_CONVERSATION,
		State: kvleasev1.LeaseState_LEASE_STATE_HELD, Holder: engine.holder, Tenant: tenant,
		ConversationKey: binary.BigEndian.AppendUint64(nil, leaseID), Tokens: 2 * blockSize,
		Model: "example", LayoutHash: engine.layout.LayoutHash,
	}
	engine.ends = time.Now().Add(provisional)
	engine.send(&kvleasev1.AttachRequest{Message: &kvleasev1.AttachRequest_Offer{Offer: &kvleasev1.LeaseOffer{
		Lease: engine.lease, Remaining: durationpb.New(provisional), Provisional: true,
	}}})
}

// send leaves a broken stream to the reader, which ends then.
func (engine *Engine) send(request *kvleasev1.AttachRequest) {
	_ = engine.stream.Send(request)
}

func (engine *Engine) serve() {
	for {
		message, err := engine.stream.Recv()
		if err != nil {
			return
		}
		engine.mutex.Lock()
		engine.answer(message)
		engine.mutex.Unlock()
	}
}

func (engine *Engine) answer(message *kvleasev1.AttachResponse) {
	switch command := message.Message.(type) {
	case *kvleasev1.AttachResponse_Pin:
		engine.send(&kvleasev1.AttachRequest{Message: &kvleasev1.AttachRequest_PinReply{PinReply: &kvleasev1.PinReply{
			CallId: command.Pin.CallId, Result: engine.pin(command.Pin.Pin),
		}}})
	case *kvleasev1.AttachResponse_Unpin:
		delete(engine.pins, command.Unpin.PinId)
	case *kvleasev1.AttachResponse_Renew:
		engine.renew(command.Renew)
	case *kvleasev1.AttachResponse_Release:
		engine.release(command.Release)
	case *kvleasev1.AttachResponse_ReadCounters:
		engine.send(&kvleasev1.AttachRequest{Message: &kvleasev1.AttachRequest_Gauges{
			Gauges: &kvleasev1.HolderGauges{CallId: command.ReadCounters.CallId},
		}})
	default: // An order of eviction means nothing to a table of one lease.
	}
}

func (engine *Engine) miss(leaseID uint64) kvleasev1.MissReason {
	switch {
	case engine.lease == nil || engine.lease.LeaseId != leaseID:
		return kvleasev1.MissReason_MISS_REASON_UNKNOWN
	case len(engine.pins) == 0 && time.Now().After(engine.ends):
		return kvleasev1.MissReason_MISS_REASON_EXPIRED
	}
	return kvleasev1.MissReason_MISS_REASON_UNSPECIFIED
}

func (engine *Engine) pin(pin *kvleasev1.PinRequestSpec) *kvleasev1.PinResult {
	if !proto.Equal(pin.Holder, engine.holder) {
		return &kvleasev1.PinResult{Miss: kvleasev1.MissReason_MISS_REASON_HOLDER_CHANGED}
	}
	if miss := engine.miss(pin.LeaseId); miss != kvleasev1.MissReason_MISS_REASON_UNSPECIFIED {
		return &kvleasev1.PinResult{Miss: miss}
	}
	engine.pins[pin.PinId] = true
	return &kvleasev1.PinResult{
		Holder: engine.holder, Tokens: 2 * blockSize, LayoutHash: engine.layout.LayoutHash,
	}
}

func (engine *Engine) renew(command *kvleasev1.RenewCommand) {
	reply := &kvleasev1.RenewReply{Sequence: command.Sequence}
	for _, leaseID := range command.LeaseIds {
		if miss := engine.miss(leaseID); miss != kvleasev1.MissReason_MISS_REASON_UNSPECIFIED {
			reply.Misses = append(reply.Misses, &kvleasev1.LeaseMiss{LeaseId: leaseID, Reason: miss})
			continue
		}
		engine.ends = time.Now().Add(command.Duration.AsDuration())
		engine.tell(&kvleasev1.LeaseEvents_Event{
			LeaseId: leaseID, State: kvleasev1.LeaseState_LEASE_STATE_HELD, Confirmed: true,
		})
	}
	engine.send(&kvleasev1.AttachRequest{Message: &kvleasev1.AttachRequest_RenewReply{RenewReply: reply}})
}

func (engine *Engine) release(command *kvleasev1.ReleaseCommand) {
	miss := engine.miss(command.LeaseId)
	if miss == kvleasev1.MissReason_MISS_REASON_UNSPECIFIED {
		// Nobody READs from this engine, so the lease need not drain first.
		engine.lease = nil
		clear(engine.pins)
		engine.tell(&kvleasev1.LeaseEvents_Event{
			LeaseId: command.LeaseId, State: kvleasev1.LeaseState_LEASE_STATE_RELEASED,
		})
	}
	engine.send(&kvleasev1.AttachRequest{Message: &kvleasev1.AttachRequest_ReleaseReply{
		ReleaseReply: &kvleasev1.ReleaseReply{CallId: command.CallId, Miss: miss},
	}})
}

func (engine *Engine) tell(event *kvleasev1.LeaseEvents_Event) {
	engine.send(&kvleasev1.AttachRequest{Message: &kvleasev1.AttachRequest_Events{Events: &kvleasev1.LeaseEvents{
		Events: []*kvleasev1.LeaseEvents_Event{event}, Holder: engine.holder,
	}}})
}
