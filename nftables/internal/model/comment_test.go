package model

import (
	"context"
	"math"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestCommentsNameTheServicePort reads the comments of frontends of every kind as Lookup, Ready and
// Traffic do, and those of sticky pools as Adopt does. Both are formats that other versions read.
func TestCommentsNameTheServicePort(t *testing.T) {
	p := backendtest.NewNode(t, tracker.Config{})
	balanced := func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.8"}, {IP: "2001:db8::8"}}
	}
	unnamed := backendtest.Service(backendtest.ServiceName(3), "", "10.96.0.4", "fd00:10:96::4", backendtest.NodePort(30004))
	p.Tracker.SetService(backendtest.Numbered(0))
	p.Tracker.SetService(backendtest.Numbered(1, backendtest.NodePort(30002), backendtest.ExternalIPs("192.0.2.7", "2001:db8::7"), backendtest.ExternalLocal, backendtest.Affinity(10), balanced))
	p.Tracker.SetService(backendtest.Numbered(2, backendtest.NodePort(30003), backendtest.Over(v1.ProtocolUDP)))
	p.Tracker.SetService(unnamed)
	for i, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		p.Tracker.SetSlice(backendtest.NumberedSlice(1, f, 2*i, 2*i+1))
	}
	var contents recorder
	c := p.Engine.Attach("contents", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) (err error) {
		contents, err = filled(ctx, d)
		return err
	}))
	must.Do(t, c.Sync(t.Context()))

	kinds := map[ruleset.Kind]bool{}
	sticky := 0
	for _, s := range p.Engine.Snapshot().Ports {
		sets := contents[s.Key.Family]
		for i := range s.Frontends {
			f := &s.Frontends[i]
			kinds[f.Kind] = true
			all, _, key := layout.FrontendKey(f.Kind == ruleset.KindNodePort, f.Addr, inet.Protocol(s.Key.Protocol), f.Port)
			comment := sets[all][key].Comment
			if got := layout.ParseServiceComment(comment, s.Key.Protocol); got != s.Key.ServicePortName {
				t.Errorf("%v: the comment %q of a frontend of kind %v names %v", s.Key, comment, f.Kind, got)
			}
		}
		if s.Spec.Affinity == 0 {
			continue
		}
		a := NewAdopted()
		for key, e := range sets[layout.StickyEndpoints] {
			a.Add(key.Bytes(), e.Data, e.Comment)
		}
		for _, owner := range []StickyOwner{StickyOwner(s.Key.String()), StickyOwner(s.Key.String() + " local")} {
			if p := a.Pools[owner]; p == nil || len(p.members) == 0 {
				t.Errorf("%v: no comment names the sticky pool %q; those named are %v", s.Key, owner, a.Pools)
			}
			sticky++
		}
	}
	if len(kinds) != 4 || sticky != 4 {
		t.Errorf("frontends are of the kinds %v, and sticky pools %d", kinds, sticky)
	}
}

// recorder is a [Sink] that stores the elements of all transactions.
type recorder map[tracker.Family]map[layout.Set]map[layout.Octets]nft.Element

func (recorder) Limit() (int, Meter) { return math.MaxInt, nil }

func (r recorder) Send(tx *Tx) error {
	for _, e := range tx.Edits {
		sets := r[e.Family]
		if sets[e.Set] == nil {
			sets[e.Set] = map[layout.Octets]nft.Element{}
		}
		e.Each(func(one nft.Element) { sets[e.Set][layout.OctetsOf(one.Key)] = one })
	}
	return nil
}

func (r recorder) Commit(tx *Tx) error { return r.Send(tx) }

// filled returns the elements of new tables with the Services of a full delta.
func filled(ctx context.Context, d *ruleset.Delta) (recorder, error) {
	r := recorder{}
	var list []*Table
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		r[f] = map[layout.Set]map[layout.Octets]nft.Element{}
		list = append(list, NewTable(f, d.Node, DefaultConfig, d.Changes, 0))
	}
	_, err := NewTables(list...).Fill(ctx, d, r, &Tx{}, nil)
	return r, err
}
