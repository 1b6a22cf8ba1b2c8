package conntrack

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// service describes a Service port. A test changes a copy and compiles it.
type service struct {
	name      string
	protocol  v1.Protocol // UDP if empty
	cluster   string      // cluster IP and port
	nodePort  uint16
	external  []string // external IPs
	endpoints []*tracker.Endpoint
}

// ep returns an endpoint at "addr:port". how is "", "terminating" (but serving), "gone"
// (neither ready nor serving) "published" (ready but not serving) or "elsewhere" (on another node).
func ep(at, how string) *tracker.Endpoint {
	e := &tracker.Endpoint{Addr: ap(at), Ready: true, Serving: true, Weight: 1, Node: "here"}
	switch how {
	case "terminating":
		e.Ready, e.Terminating = false, true
	case "gone":
		e.Ready, e.Serving, e.Terminating = false, false, true
	case "published":
		e.Serving = false
	case "elsewhere":
		e.Node = "there"
	}
	return e
}

func eps(at ...string) []*tracker.Endpoint {
	var out []*tracker.Endpoint
	for _, a := range at {
		out = append(out, ep(a, ""))
	}
	return out
}

func (s service) key() tracker.Key {
	p := s.protocol
	if p == "" {
		p = v1.ProtocolUDP
	}
	return tracker.Key{
		ServicePortName: tracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "default", Name: s.name}, Protocol: p,
		},
		Family: tracker.FamilyOf(ap(s.cluster).Addr()),
	}
}

func (s service) compile(n *ruleset.Node) *ruleset.Port {
	p := &tracker.ServicePort{
		Key: s.key(), ClusterIP: ap(s.cluster).Addr(), Port: ap(s.cluster).Port(), NodePort: s.nodePort,
	}
	for _, e := range s.external {
		p.ExternalIPs = append(p.ExternalIPs, addr(e))
	}
	return ruleset.Compile(tracker.PortState{Port: p, Endpoints: s.endpoints}, n)
}

// everyAddress returns a node whose NodePorts answer at all its addresses.
func everyAddress() *ruleset.Node {
	return &ruleset.Node{
		Info:       tracker.NodeInfo{Name: "here"},
		NodePorts4: ruleset.NodePorts{All: true},
		NodePorts6: ruleset.NodePorts{All: true},
	}
}

// change returns the change of one Service.
func change(old, now *ruleset.Port) ruleset.Change {
	c := ruleset.Change{Old: old, New: now, Fields: ruleset.FieldAll}
	for _, s := range []*ruleset.Port{now, old} {
		if s != nil {
			c.Key = s.Key
		}
	}
	return c
}

// note records a delta and the error of its Apply.
func (c *Cleaner) note(d *ruleset.Delta, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record(d, err)
}

// memory is a table in memory.
type memory struct {
	// mu is held while a call begins. A test that looks at the fields while a Cleaner runs must
	// hold it.
	mu    sync.Mutex
	flows []Flow
	local []netip.Addr
	dumps int
	// during, if not nil, runs in the middle of each Dump.
	during func()
	// fail, if not nil, is the error of the next Dump, after half of the flows.
	fail error
	// refuse, if not nil, is the error of every Delete.
	refuse error
	// deleted, if not nil, is called with each flow that Delete removes.
	deleted func(Flow)
}

func (m *memory) Dump(_ context.Context, f tracker.Family, see func(*Flow)) error {
	m.mu.Lock()
	m.dumps++
	m.mu.Unlock()
	flows := m.flows
	if m.fail != nil {
		flows = flows[:len(flows)/2]
	}
	for i, fl := range flows {
		if i == len(flows)/2 && m.during != nil {
			m.during()
		}
		if tracker.FamilyOf(fl.Dst.Addr()) == f {
			see(&fl)
		}
	}
	err := m.fail
	m.fail = nil
	return err
}

func (m *memory) Delete(_ context.Context, doomed []Flow) (int, error) {
	m.mu.Lock()
	refuse := m.refuse
	m.mu.Unlock()
	if refuse != nil {
		return 0, refuse
	}
	gone := map[Flow]bool{}
	for _, f := range doomed {
		gone[f] = true
		if m.deleted != nil {
			m.deleted(f)
		}
	}
	before := len(m.flows)
	m.flows = slices.DeleteFunc(m.flows, func(f Flow) bool { return gone[f] })
	return before - len(m.flows), nil
}

func (m *memory) LocalAddrs(_ context.Context, f tracker.Family) ([]netip.Addr, error) {
	return slices.DeleteFunc(slices.Clone(m.local), func(a netip.Addr) bool { return tracker.FamilyOf(a) != f }), nil
}

// flow returns a UDP flow from a client to dst whose replies come from src. src equals dst if
// the flow was not translated.
func flow(client, dst, src string) Flow {
	return Flow{Protocol: inet.UDP, Src: ap(client), Dst: ap(dst), ReplySrc: ap(src), ReplyDst: ap(client)}
}
