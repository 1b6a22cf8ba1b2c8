package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// rig is a backend in a network namespace of its own, with the pipeline in front of it.
type rig struct {
	tb      testing.TB
	node    node
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
	made    *counter
	config  Config
}

// node is where the Backends of a rig work: a host, or a namespace in memory.
type node interface {
	// open returns a new Backend.
	open(testing.TB, Config) (*Backend, error)
	// lines runs a program and returns the lines of its output, with single blanks.
	lines(tb testing.TB, command string) []string
	// limit sets the largest number of elements of a set that exists.
	limit(tb testing.TB, set string, most int)
}

// newRigOn starts a backend on the node.
func newRigOn(tb testing.TB, n node, c Config) *rig {
	tb.Helper()
	r := &rig{tb: tb, node: n, config: c}
	p, err := backendtest.NewPipeline(tracker.Config{
		Node:     tracker.NodeInfo{Name: "node", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:1::1")}},
		Families: c.Families,
		OnService: func(s *v1.Service, _ *v1.ServicePort, out *tracker.ServicePort) error {
			if s.Annotations["hash"] != "" {
				out.Hash = tracker.HashSource
			}
			if text := s.Annotations["properties"]; text != "" {
				name, rest, _ := strings.Cut(text, " ")
				out.Ext = properties{Scheduler: Scheduler(name), HashPort: rest == "port", OnePacket: s.Annotations["one-packet"] != "",
					Forwarding: map[string]Forwarding{"tunnel": ForwardingTunnel, "gue": ForwardingGUE, "gre": ForwardingGRE, "direct": ForwardingDirect}[rest]}
			}
			return nil
		},
		OnEndpoint: func(_ *discovery.EndpointSlice, ep *discovery.Endpoint, out *tracker.Endpoint) error {
			if ep.Hostname != nil {
				_, err := fmt.Sscanf(*ep.Hostname, "weight-%d", &out.Weight)
				return err
			}
			return nil
		},
	}, ruleset.Config{})
	if err != nil {
		tb.Fatal(err)
	}
	r.tracker, r.engine = p.Tracker, p.Engine
	r.restart()
	return r
}

// restart attaches a new backend, as a new process would.
func (r *rig) restart() {
	r.tb.Helper()
	if r.cursor != nil {
		r.cursor.Detach()
		r.backend.Close()
	}
	b := must.Get(r.node.open(r.tb, r.config))(r.tb)
	r.tb.Cleanup(func() { b.Close() })
	r.backend, r.made, r.cursor = b, count(b), r.engine.Attach("ipvs", b)
}

func (r *rig) sync() {
	r.tb.Helper()
	if err := r.cursor.Sync(context.Background()); err != nil {
		r.tb.Fatalf("sync: %v", err)
	}
}

// calls returns the number of requests to the kernel.
func (r *rig) calls() int {
	return r.made.total()
}

// run runs a program on the host and returns the lines of its output.
func (r *rig) run(command string) []string {
	r.tb.Helper()
	list := r.node.lines(r.tb, command)
	if command != "ipvsadm -Sn" {
		return list
	}
	// The kernel writes virtual servers a page at a time and counts from the beginning of a table
	// that all namespaces share: a list may lack a virtual server, or have one twice, while
	// another namespace's come and go. Two equal lists are right.
	for range 20 {
		again := r.node.lines(r.tb, command)
		if slices.Equal(list, again) {
			break
		}
		list = again
	}
	return list
}

// has fails the test unless the output of the program has each of the lines.
func (r *rig) has(command string, want ...string) {
	r.tb.Helper()
	if gone := missing(want, r.run(command)); len(gone) != 0 {
		r.tb.Errorf("%s has no %q:\n%s", command, gone, strings.Join(r.run(command), "\n"))
	}
}

// hasNot fails the test if a line of the output has one of the texts.
func (r *rig) hasNot(command string, texts ...string) {
	r.tb.Helper()
	for _, l := range r.run(command) {
		for _, t := range texts {
			if strings.Contains(l, t) {
				r.tb.Errorf("%s has %q", command, l)
			}
		}
	}
}

// properties are a Service's as an extension.
type properties Properties

func (p properties) Equal(o tracker.Extension) bool { return o == tracker.Extension(p) }

// propertiesOf is for Config.Properties.
func propertiesOf(s *ruleset.Port) Properties {
	p, _ := s.Spec.Ext.(properties)
	return Properties(p)
}

// with sets the properties of a Service, as in "mh port".
func with(text string) func(*v1.Service) {
	return func(s *v1.Service) { s.Annotations = map[string]string{"properties": text} }
}

func svcName(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: "default", Name: fmt.Sprint("svc", i)}
}

func clusterIP(i int) string  { return fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&0xff, i&0xff) }
func clusterIP6(i int) string { return fmt.Sprintf("fd00:96::%x", i+1) }

// svc returns a Service with TCP port 80.
func svc(i int, edits ...func(*v1.Service)) *v1.Service {
	return backendtest.Service(svcName(i), "http", clusterIP(i), clusterIP6(i), edits...)
}

// Edits of Services.
var (
	over          = backendtest.Over
	nodePort      = backendtest.NodePort
	externalIPs   = backendtest.ExternalIPs
	externalLocal = backendtest.ExternalLocal
	affinity      = backendtest.Affinity
)

func sticky(s *v1.Service) { s.Spec.SessionAffinity = v1.ServiceAffinityClientIP }

func hashed(s *v1.Service) { s.Annotations = map[string]string{"hash": "source"} }

// slice returns the Service's endpoints: 10.244.1.n on this node for positive n, and 10.245.x.y
// on another node for negative n.
func slice(i int, p v1.Protocol, ns ...int) *discovery.EndpointSlice {
	s := backendtest.Slice(svcName(i), "1", tracker.IPv4, "http", p)
	for _, n := range ns {
		node, addr := "node", fmt.Sprintf("10.244.1.%d", n)
		if n < 0 {
			node, addr = "other", fmt.Sprintf("10.%d.%d.%d", 245+-n>>16, -n>>8&0xff, -n&0xff)
		}
		s.Endpoints = append(s.Endpoints, backendtest.Endpoint(addr, node))
	}
	return s
}

// set passes a Service and its endpoints to the tracker.
func (r *rig) set(s *v1.Service, i int, ns ...int) {
	r.tracker.SetService(s)
	r.tracker.SetSlice(slice(i, s.Spec.Ports[0].Protocol, ns...))
}

func (r *rig) remove(i int) {
	r.tracker.DeleteService(svcName(i))
	r.tracker.DeleteSlice(types.NamespacedName{Namespace: "default", Name: svcName(i).Name + "-1"})
}

// agree compares the lists of ipvsadm and ip with the snapshot. It ignores virtual servers with
// a mark, and draining real servers.
func (r *rig) agree() {
	r.tb.Helper()
	var want []string
	rs := r.engine.Snapshot()
	proto := map[v1.Protocol]string{v1.ProtocolTCP: "-t", v1.ProtocolUDP: "-u", v1.ProtocolSCTP: "--sctp-service"}
	var own []string
	for _, a := range r.run("ip -o addr show dev eth0") {
		f := strings.Fields(a)
		p := netip.MustParsePrefix(f[3])
		if !p.Addr().IsLinkLocalUnicast() {
			own = append(own, p.Addr().String())
		}
	}
	bound := map[string]bool{}
	for _, s := range rs.Ports {
		for _, f := range s.Frontends {
			addrs := []string{f.Addr.String()}
			if f.Kind == ruleset.KindNodePort {
				addrs = nil
				for _, a := range own {
					if tracker.FamilyOf(netip.MustParseAddr(a)) == s.Key.Family {
						addrs = append(addrs, a)
					}
				}
			} else if !slices.Contains(own, addrs[0]) {
				bound[addrs[0]] = true
			}
			if f.Target == ruleset.TargetReject {
				continue // rules refuse connections
			}
			for _, a := range addrs {
				v := fmt.Sprintf("%s %s", proto[s.Key.Protocol], netip.AddrPortFrom(netip.MustParseAddr(a), f.Port))
				want = append(want, "-A "+v)
				for _, ep := range s.Pool(f.Target) {
					want = append(want, fmt.Sprintf("-a %s -r %s", v, ep.Addr))
				}
			}
		}
	}
	var got []string
	for _, l := range r.run("ipvsadm -Sn") {
		f := strings.Fields(l)
		if f[1] == "-f" || slices.Contains(f, "-w") && f[slices.Index(f, "-w")+1] == "0" {
			continue
		}
		l, _, _ = strings.Cut(l, " -s ")
		l, _, _ = strings.Cut(l, " -m ")
		got = append(got, l)
	}
	r.same("virtual and real servers", got, want)

	var addrs, wanted []string
	for _, a := range r.run("ip -o addr show dev " + deviceName) {
		if p := netip.MustParsePrefix(strings.Fields(a)[3]); !p.Addr().IsLinkLocalUnicast() {
			addrs = append(addrs, p.Addr().String())
		}
	}
	for a := range bound {
		wanted = append(wanted, a)
	}
	r.same("addresses of "+deviceName, addrs, wanted)
}

func (r *rig) same(what string, got, want []string) {
	r.tb.Helper()
	for _, l := range missing(got, want) {
		r.tb.Errorf("%s: unexpected: %s", what, l)
	}
	for _, l := range missing(want, got) {
		r.tb.Errorf("%s: missing: %s", what, l)
	}
	if len(got) != len(want) {
		r.tb.Errorf("%s: %d, want %d", what, len(got), len(want))
	}
}

// needFull fails the test unless err asks for a full delta.
func needFull(tb testing.TB, err error, what string) {
	tb.Helper()
	if !errors.Is(err, ruleset.ErrNeedFull) {
		tb.Errorf("%s: %v, want ErrNeedFull", what, err)
	}
}

// missing returns the elements of a that b lacks.
func missing[T comparable](a, b []T) []T {
	return slices.DeleteFunc(slices.Clone(a), func(x T) bool { return slices.Contains(b, x) })
}
