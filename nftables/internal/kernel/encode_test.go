//go:build linux

package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// longest is a table name of the greatest length.
var longest = strings.Repeat("x", 62)

// rulesFor returns rules with every option.
func rulesFor(f tracker.Family, local ruleset.LocalTraffic) Rules {
	return Rules{Family: f, Mark: 1 << 14, Seed: 1, Offload: &Offload{AfterPackets: 20, UDP: true}, Local: local}
}

// sizes is a sink that compares the encoded size of each transaction with the planned one.
type sizes struct {
	local ruleset.LocalTraffic
	sent  int
}

func (s *sizes) Limit() (int, model.Meter) { return 1 << 20, s.writer() }

func (s *sizes) writer() *Writer {
	return NewWriter(longest, rulesFor(tracker.IPv4, s.local), rulesFor(tracker.IPv6, s.local))
}

func (s *sizes) Send(tx *model.Tx) error {
	w := s.writer()
	w.Add(tx)
	if err := w.Finish(); err != nil {
		return err
	}
	if w.batch.Len() > tx.Size() || tx.Size() > tx.Limit {
		return fmt.Errorf("a transaction of %d bytes, but its size is %d of %d", w.batch.Len(), tx.Size(), tx.Limit)
	}
	s.sent++
	return nil
}

func (s *sizes) Commit(tx *model.Tx) error { return s.Send(tx) }

// result returns what a backend returns that could not program the failed Services.
func result(failed map[tracker.Key]error, err error) error {
	if err == nil && failed != nil {
		err = &ruleset.PartialError{Failed: failed}
	}
	return err
}

// TestTransactionsTakeNoMoreThanTheirSize plans random changes of Services with long names, and
// encodes the transactions.
func TestTransactionsTakeNoMoreThanTheirSize(t *testing.T) {
	p := backendtest.NewNode(t, tracker.Config{OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint})
	sink := &sizes{}
	var tables *model.Tables
	cursor := p.Engine.Attach("sizes", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		if !d.Full {
			failed, err := tables.Update(ctx, d, sink)
			if errors.Is(err, model.ErrOverflow) {
				return ruleset.ErrNeedFull
			}
			return result(failed, err)
		}
		sink.local = d.Node.LocalTraffic
		create := &model.Tx{}
		var list []*model.Table
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			tab := model.NewTable(f, d.Node, model.DefaultConfig, d.Changes, 0)
			tab.Create(nil, false, create)
			tab.Hook(create)
			list = append(list, tab)
		}
		tables = model.NewTables(list...)
		failed, err := tables.Fill(ctx, d, sink, create, nil)
		return result(failed, err)
	}))
	rng := rand.New(rand.NewPCG(7, 7))
	long := func(n int) string { return strings.Repeat("x", n) }
	for range 60 {
		for range 5 {
			i := rng.IntN(20)
			name := backendtest.ServiceName(i)
			name.Namespace, name.Name = "ns"+long(60), name.Name+long(50)
			if rng.IntN(4) == 0 {
				p.Tracker.DeleteService(name)
				continue
			}
			port := "p" + long(14)
			p.Tracker.SetService(backendtest.Service(name, port, fmt.Sprintf("10.96.0.%d", i+1), fmt.Sprintf("fd00:10:96::%x", i+1), func(s *v1.Service) {
				s.Spec.Type = v1.ServiceTypeLoadBalancer
				s.Spec.Ports[0].NodePort = int32(30000 + i)
				s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: fmt.Sprintf("203.0.113.%d", i)}, {IP: fmt.Sprintf("2001:db8:1::%x", i)}}
				for range rng.IntN(12) {
					s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges,
						fmt.Sprintf("172.16.0.0/%d", 1+rng.IntN(32)), fmt.Sprintf("2001:db8:2::/%d", 1+rng.IntN(128)))
				}
				if rng.IntN(2) == 0 {
					backendtest.ExternalLocal(s)
				}
				if rng.IntN(2) == 0 {
					backendtest.Affinity(1 + rng.Int32N(86400))(s)
				}
				worldgen.SetHash(s, [...]tracker.Hash{0, 0, tracker.HashSource}[rng.IntN(3)])
			}))
			for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				slice := backendtest.Slice(name, f.String(), f, port, v1.ProtocolTCP)
				for e := range rng.IntN([]int{2, 20, 2000}[rng.IntN(3)]) {
					addr := fmt.Sprintf("10.244.%d.%d", e>>8, e&255)
					if f == tracker.IPv6 {
						addr = fmt.Sprintf("fd00:10:244::%x", e)
					}
					slice.Endpoints = append(slice.Endpoints, backendtest.Endpoint(addr, [...]string{backendtest.ThisNode, "far"}[e%2]))
				}
				p.Tracker.SetSlice(slice)
			}
		}
		if err := cursor.Sync(t.Context()); !ruleset.InEffect(err) {
			t.Fatal(err)
		}
	}
	if sink.sent < 50 {
		t.Errorf("only %d transactions", sink.sent)
	}
}

// TestInterfaceNamesAreKept compiles conditions about interfaces whose names could end a rule's words.
func TestInterfaceNamesAreKept(t *testing.T) {
	for _, name := range []string{"br0", "br*", `a"b`, "$mark", `\x41`, "a ip b", "bücke"} {
		whole := nft.InterfaceName(name)
		for _, c := range []struct {
			local ruleset.LocalTraffic
			want  []byte
		}{{ruleset.LocalTraffic{Bridge: name}, whole}, {ruleset.LocalTraffic{InterfacePrefix: name}, []byte(name)}} {
			w := Rules{Family: tracker.IPv6, Mark: 1, Local: c.local}
			rule := w.complete(w.localTraffic("== ")[0])
			exprs, err := nft.Compile(inet.AF(w.Family), rule, nil)
			if err != nil || len(exprs) != 2 || !bytes.Contains(exprs[1], c.want) {
				t.Errorf("%q: %q, %v", rule, exprs, err)
			}
		}
	}
}
