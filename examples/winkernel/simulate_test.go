package winkernel_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// lacks lists what the service cannot do.
var lacks = map[conformance.Feature]string{
	conformance.SourceRanges:       "HNS has no filter by source",
	conformance.RefuseBySource:     "as source ranges",
	conformance.AffinityTimeout:    "HNS has no timeout",
	conformance.NodePortAddresses:  "a node port answers at every address",
	conformance.ClosedPorts:        "HNS cannot refuse",
	conformance.ServiceCIDRs:       "HNS cannot refuse",
	conformance.Refuse:             "HNS cannot refuse",
	conformance.MasqueradeAll:      "HNS decides about the source",
	conformance.Masquerade:         "HNS decides about the source",
	conformance.InterfaceDetection: "there is no internal traffic to detect",
	conformance.ShortCircuit:       "a load balancer has one list of endpoints",
	conformance.WeightedEndpoints:  "HNS has no weights",
	conformance.ConsistentHash:     "HNS has no hash",
	conformance.EndpointPorts:      "a load balancer has one internal port",
}

// host is a node with a service in memory and a network plugin that makes endpoints before
// the agent hears of pods.
type host struct {
	*fakehns.Service
	network winkernel.Network
	local   map[tracker.Key][]netip.Addr
}

func newHost(n winkernel.Network, modify bool) *host {
	return &host{Service: fakehns.New(n, modify), network: n, local: map[tracker.Key][]netip.Addr{}}
}

// plug makes the local endpoints that the delta asks for. It returns a function that deletes
// those of pods that are gone, or only some, as the network plugin does once their Services do
// without them. It deletes all after the delta is in effect, and keeps what a Service may have
// whose change failed and waits for a later delta.
func (h *host) plug(node string, d *ruleset.Delta) (unplug func(only ...netip.Addr)) {
	wants := map[tracker.Key][]netip.Addr{}
	for _, c := range d.Changes {
		wants[c.Key] = nil
		if c.New == nil {
			continue
		}
		for _, e := range c.New.Endpoints {
			if e.IsLocal(node) {
				wants[c.Key] = append(wants[c.Key], e.Addr.Addr())
			}
		}
	}
	all := func() map[netip.Addr]bool {
		out := map[netip.Addr]bool{}
		for _, lists := range []map[tracker.Key][]netip.Addr{h.local, wants} {
			for _, list := range lists {
				for _, a := range list {
					out[a] = true
				}
			}
		}
		return out
	}
	has := map[netip.Addr]bool{}
	endpoints, _ := h.Endpoints()
	for _, e := range endpoints {
		has[e.Addrs[0]] = has[e.Addrs[0]] || !e.Remote
	}
	for k, list := range wants {
		h.local[k] = append(h.local[k], list...)
	}
	for a := range all() {
		if !has[a] {
			h.Plug(winkernel.Endpoint{Addrs: []netip.Addr{a}, MAC: "00-15-5d-00-00-02"})
		}
	}
	return func(only ...netip.Addr) {
		if len(only) == 0 {
			maps.Copy(h.local, wants)
		}
		want := all()
		for a, local := range has {
			if local && !want[a] && (len(only) == 0 || slices.Contains(only, a)) {
				h.Unplug(a)
			}
		}
	}
}

// handle looks a packet up in the load balancers, as the service does.
func (h *host) handle(p ruleset.Packet) conformance.Outcome {
	f := winkernel.Frontend{VIP: p.To.Addr(), Port: p.To.Port(), Protocol: p.Protocol, Family: tracker.FamilyOf(p.To.Addr())}
	lb, endpoints, ok := h.Find(f)
	if !ok && slices.Contains(p.NodeAddresses, p.To.Addr()) && !p.To.Addr().IsLoopback() {
		f.VIP = netip.Addr{}
		lb, endpoints, ok = h.Find(f)
	}
	if !ok {
		return conformance.Outcome{}
	}
	out := conformance.Outcome{Action: ruleset.ActionForward}
	if lb.ClientAffinity {
		out.Affinity = 1
	}
	for _, e := range endpoints {
		c := conformance.Choice{Weight: 1}
		if len(e.Addrs) != 0 && tracker.FamilyOf(e.Addrs[0]) == f.Family {
			c.Addr = netip.AddrPortFrom(e.Addrs[0], lb.InternalPort)
		}
		out.Endpoints = append(out.Endpoints, c)
	}
	return out
}

// dump returns the load balancers, without IDs, and the remote endpoints.
func (h *host) dump() string {
	lbs, _ := h.LoadBalancers()
	endpoints, _ := h.Endpoints()
	byID := map[string]winkernel.Endpoint{}
	var lines []string
	for _, e := range endpoints {
		byID[e.ID] = e
		if e.Remote {
			lines = append(lines, fmt.Sprint("remote ", e.Addrs))
		}
	}
	for _, lb := range lbs {
		lines = append(lines, describeLB(lb, byID))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// allWaiting returns the addresses that Services wait for.
func allWaiting(err error) (out []netip.Addr) {
	var partial *ruleset.PartialError
	if errors.As(err, &partial) {
		for _, err := range partial.Failed {
			var waiting *winkernel.WaitingError
			if errors.As(err, &waiting) {
				out = append(out, waiting.Addrs...)
			}
		}
	}
	return out
}

// TestConformance runs fewer random worlds and one kind of network with -dlls, unless -dlls.all
// is set: a call by way of Wine takes a millisecond. All random worlds run in one kind of network,
// and in the others in the long form.
func TestConformance(t *testing.T) {
	fewer := *dlls && !*allDLLs
	for _, c := range []struct {
		network  winkernel.NetworkType
		families []tracker.Family
		modify   bool
		// refuses: writes that fail are refused, so the service need not be read again.
		refuses bool
		worlds  int
	}{
		{winkernel.L2Bridge, nil, true, false, 0},
		{winkernel.L2Bridge, nil, true, true, 6},
		{winkernel.L2Bridge, nil, false, false, 6},
		{winkernel.Overlay, []tracker.Family{tracker.IPv4}, true, false, 6},
		{winkernel.Overlay, []tracker.Family{tracker.IPv4}, true, true, 6},
	} {
		worlds := c.worlds
		switch {
		case fewer:
			worlds = 4
		case testtime.Thorough():
			worlds = 0
		}
		if fewer && c.network != winkernel.Overlay {
			continue
		}
		if !fewer && !testtime.Thorough() && c.refuses != (c.network == winkernel.Overlay) {
			continue // the short form has each property once
		}
		t.Run(fmt.Sprintf("%s/modify=%v/refuses=%v", c.network, c.modify, c.refuses), func(t *testing.T) {
			conformance.Simulate(t, conformance.Simulation{Skip: lacks, Families: c.families, Worlds: worlds, New: func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
				return simulated(tb, env, c.network, c.modify, c.refuses)
			}})
		})
	}
}

func simulated(tb testing.TB, env conformance.SimEnv, network winkernel.NetworkType, modify, refuses bool) conformance.Fake {
	h := newHost(winkernel.Network{ID: networkID, Name: "cluster", Type: network}, modify)
	failed := false // a write of this Apply
	h.Before = func(fakehns.Call) error {
		err := env.Fail()
		failed = failed || err != nil
		if err != nil && refuses {
			err = fmt.Errorf("%w: %w", winkernel.ErrInvalidAddr, err)
		}
		return err
	}
	if modify { // otherwise a changed load balancer is missing for a moment
		h.After = func(fakehns.Call) { env.Look() }
	}
	return conformance.Fake{
		Handle: h.handle, Dump: h.dump,
		Backend: func() ruleset.Backend {
			var ips []netip.Addr
			for _, f := range env.Families {
				ips = append(ips, map[tracker.Family]netip.Addr{tracker.IPv4: netip.MustParseAddr("192.0.2.250"), tracker.IPv6: netip.MustParseAddr("2001:db8::250")}[f])
			}
			var b *winkernel.Backend
			return ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
				service := api(tb, h.Service) // worlds take turns
				if b == nil {
					var err error
					if b, err = winkernel.New(ctx, winkernel.Config{
						HNS: service, Network: "cluster", Node: d.Node.Info.Name, NodeIPs: ips,
						HostMAC: "00-15-5d-00-00-01", SourceVIP: netip.MustParseAddr("192.0.2.251"),
					}); err != nil {
						return err
					}
				}
				unplug := h.plug(d.Node.Info.Name, d)
				failed = false
				err := b.Apply(ctx, d)
				// A load balancer that could not be changed may still have what others wait for.
				if waiting := (*winkernel.WaitingError)(nil); errors.As(err, &waiting) && !failed {
					unplug(allWaiting(err)...)
					err = b.Apply(ctx, d)
				}
				if err == nil {
					unplug()
				}
				return err
			})
		},
	}
}
