package nftables

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestStagesComeAndGo restarts with other stages, and reads the hooks in the kernel after each start.
func TestStagesComeAndGo(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.tracker.SetService(svc(0))
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1))
	usual := map[string]int32{
		layout.ChainNATPrerouting: -102, layout.ChainNATOutput: -102, layout.ChainPreroutingAgain: -101, layout.ChainOutputAgain: -101,
		layout.ChainNATPostrouting: 99, layout.ChainFilterForward: 0, layout.ChainFilterInput: 0, layout.ChainFilterOutput: 0,
	}
	without := func(names ...string) map[string]int32 {
		out := maps.Clone(usual)
		for _, n := range names {
			delete(out, n)
		}
		return out
	}
	for _, tt := range []struct {
		stages Stages
		want   map[string]int32
	}{
		{Stages{}, usual},
		{Stages{NoMasquerade: true}, without(layout.ChainNATPostrouting)},
		{Stages{DestinationNAT: -10, Filter: 20, SourceNAT: -30}, map[string]int32{
			layout.ChainNATPrerouting: -112, layout.ChainNATOutput: -112, layout.ChainPreroutingAgain: -111, layout.ChainOutputAgain: -111,
			layout.ChainNATPostrouting: 69, layout.ChainFilterForward: 20, layout.ChainFilterInput: 20, layout.ChainFilterOutput: 20,
		}},
		{Stages{NoFilter: true}, without(layout.ChainFilterInput)},
		{Stages{NoFilter: true, NoMasquerade: true}, without(layout.ChainFilterInput, layout.ChainNATPostrouting)},
		{Stages{}, usual},
	} {
		r.stages = tt.stages
		r.start()
		r.sync()
		r.verify()
		if _, err := Ready(context.Background(), r.backend.config); err != nil {
			t.Errorf("%+v: %v", tt.stages, err)
		}
		// A destination without an entry makes Lookup read which chains have rules.
		q := dataplane.Query{Packet: ruleset.Packet{To: netip.MustParseAddrPort("10.96.0.99:80"), Protocol: v1.ProtocolTCP}}
		if found, err := Lookup(t.Context(), r.backend.config, q); err != nil || found.Entry {
			t.Errorf("%+v: Lookup of an unused address: %+v, %v", tt.stages, found, err)
		}
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			chains := must.Get(r.backend.conn.Chains(r.backend.name, f))(t)
			got := map[string]int32{}
			for name, c := range chains {
				if c.Base != nil {
					got[name] = c.Base.Priority
				}
			}
			if !maps.Equal(got, tt.want) {
				t.Errorf("%+v, %v: hooks %v, want %v", tt.stages, f, got, tt.want)
			}
		}
	}
}

// TestServicesComeBeforeOtherNAT has another program translate the same connections at netfilter's usual
// priorities. Services must come first, whichever program starts first.
func TestServicesComeBeforeOtherNAT(t *testing.T) {
	t.Parallel()
	netlab.NeedPrograms(t, "nft")
	for _, first := range []string{"Services", "the other program"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			lab, hosts := netlab.NewHosts(t, "node", "peer")
			node, peer := hosts["node"], hosts["peer"]
			lab.Link(node, "peer", peer, "node")
			node.Forward()
			slice := epSlice(0, tracker.IPv4, 1)
			endpoint := slice.Endpoints[0].Addresses[0]
			node.Addrs("peer", "192.0.2.1/24")
			node.Routes("", "192.0.2.2", "0.0.0.0/0")
			peer.Addrs("node", "192.0.2.2/24", "192.0.2.3/24", endpoint+"/32")
			peer.Routes("", "192.0.2.1", "10.96.0.0/16")
			for _, a := range []string{endpoint, "192.0.2.3"} {
				peer.ServeTCP(t, a+":8080", func(c net.Conn) { fmt.Fprint(c, a, " from ", c.RemoteAddr().(*net.TCPAddr).IP) })
			}
			to := netip.AddrPortFrom(netip.MustParseAddr(svc(0).Spec.ClusterIP), 80)
			other := func() {
				rule := fmt.Sprintf("ip daddr %s tcp dport 80 dnat to 192.0.2.3:8080", to.Addr())
				if out, err := node.Run(t, "nft", "table ip other { chain in { type nat hook prerouting priority dstnat; "+rule+"; }; "+
					"chain own { type nat hook output priority -100; "+rule+"; }; chain out { type nat hook postrouting priority srcnat; snat to 192.0.2.9; }; }"); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
			if first != "Services" {
				other()
			}
			r := newRig(t, node)
			r.tracker.SetService(svc(0))
			r.tracker.SetSlice(slice)
			r.sync()
			if first == "Services" {
				other()
			}
			for name, h := range hosts {
				ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
				defer cancel()
				c, err := h.Dial(ctx, "tcp", "", to.String())
				if err != nil {
					t.Fatalf("from %s: %v", name, err)
				}
				defer c.Close()
				c.SetDeadline(time.Now().Add(testtime.Timeout))
				if got, err := io.ReadAll(c); err != nil || string(got) != endpoint+" from 192.0.2.1" {
					t.Errorf("from %s: %q, error %v", name, got, err)
				}
			}
		})
	}
}
