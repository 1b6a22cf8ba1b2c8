package model

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// discard is a sink that does nothing.
type discard struct{}

func (discard) Limit() (int, func(*Object) int) { return 256 << 20, nil }
func (discard) Send(*Tx) error                  { return nil }
func (discard) Commit(*Tx) error                { return nil }

// BenchmarkOneEndpointPlanned measures the replacement of one endpoint without the kernel: from the
// EndpointSlice to the transaction, and the part of the model alone.
func BenchmarkOneEndpointPlanned(b *testing.B) {
	for _, size := range []struct{ services, endpoints int }{{10000, 10}, {45000, 1}, {5000, 50}} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", size.services, size.endpoints), func(b *testing.B) {
			p := backendtest.NewNode(b, tracker.Config{})
			slice := func(i int) *discovery.EndpointSlice {
				s := backendtest.Slice(backendtest.ServiceName(i), "ipv4", tracker.IPv4, "p", "TCP")
				for e := range size.endpoints {
					n := i*size.endpoints + e
					s.Endpoints = append(s.Endpoints, backendtest.Endpoint(netip.AddrFrom4([4]byte{10, 128 + byte(n>>16), byte(n >> 8), byte(n)}).String(), "other"))
				}
				return s
			}
			for i := range size.services {
				s := backendtest.Service(backendtest.ServiceName(i), "p", netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)}).String(), fmt.Sprintf("fd00::%x", i+1))
				p.Tracker.SetService(s)
				p.Tracker.SetSlice(slice(i))
			}
			var tables *Tables
			cursor := p.Engine.Attach("plan", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
				if !d.Full {
					_, err := tables.Update(ctx, d, discard{})
					return err
				}
				tables = NewTables(NewTable(tracker.IPv4, d.Node, DefaultConfig, d.Changes, 0))
				_, err := tables.Fill(ctx, d, discard{}, &Tx{}, nil)
				return err
			}))
			sync := func() {
				must.Do(b, cursor.Sync(context.Background()))
			}
			sync()
			i := size.services / 2
			variants := [2]*discovery.EndpointSlice{slice(i), slice(i)}
			variants[1].Endpoints[size.endpoints/2].Addresses[0] = "10.250.0.1"
			b.ReportAllocs()
			n := 1
			for b.Loop() {
				p.Tracker.SetSlice(variants[n%2])
				sync()
				n++
			}
		})
	}
}
