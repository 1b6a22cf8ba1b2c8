package winkernel_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// world is a story in a file: objects go in, and each step has the state that the service must
// have after it.
type world struct {
	Name, About, Network string
	Format               int
	DSR                  bool
	Families             []string
	Config               struct {
		NodeName              string
		NodeIPs               []netip.Addr
		HostMAC               string
		SourceVIP             netip.Addr
		NetworkName           string
		ForwardHealthCheckVIP bool
		RootEndpointName      string
		HealthzPort           uint16
	}
	HNS struct {
		Features      struct{ ModifyLoadBalancer bool }
		Network       worldNetwork
		Endpoints     []worldEndpoint
		LoadBalancers []worldLB
	}
	Steps []worldStep
}

type worldNetwork struct {
	ID, Type      string
	RemoteSubnets []struct {
		Prefix          netip.Prefix
		ProviderAddress netip.Addr
	}
}

type worldEndpoint struct {
	Name            string
	IPs             []netip.Addr
	Remote          bool
	MAC             string
	ProviderAddress netip.Addr
	Optional        bool
}

type worldLB struct {
	VIP, Protocol              string
	ExternalPort, InternalPort uint16
	Endpoints                  []netip.Addr
	Flags, PortFlags           []string
	Distribution, SourceVIP    string
	Optional                   bool
	AnyOf                      []struct {
		InternalPort uint16
		Endpoints    []netip.Addr
	}
}

// worldEvent is what happens to the service: one of its fields is set.
type worldEvent struct {
	CreateEndpoint *worldEndpoint
	DeleteEndpoint *netip.Addr
	SetNetwork     *worldNetwork
	Fail           *struct {
		Call, Error string
		Times       int
	}
	Stop, Start bool
}

type worldStep struct {
	Name    string
	Restart bool
	HNS     []worldEvent
	Delete  []struct{ Kind, Namespace, Name string }
	Apply   []json.RawMessage
	Expect  *worldState
	Writes  struct{ Least map[string]int }
	Note    string
}

// worldState is what the service has.
type worldState struct {
	LoadBalancers []worldLB
	Endpoints     []worldEndpoint
}

// readWorlds reads the worlds in the files of the folder in flag -worlds. A file has any number of
// them, one after the other.
func readWorlds(t *testing.T) (all []*world) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(*worlds, "*.json*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no worlds in %s: %v", *worlds, err)
	}
	for _, file := range files {
		text := must.Get(os.ReadFile(file))(t)
		for d := json.NewDecoder(bytes.NewReader(text)); ; {
			w := &world{}
			if err := d.Decode(w); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("%s: after %d bytes: %v", file, d.InputOffset(), err)
			}
			if w.Format != 1 {
				t.Fatalf("%s: world %s: format %d is unknown", file, w.Name, w.Format)
			}
			all = append(all, w)
		}
	}
	return all
}

// expectations returns the number of steps with an expectation.
func (w *world) expectations() (n int) {
	for i := range w.Steps {
		if w.Steps[i].Expect != nil {
			n++
		}
	}
	return n
}

func (w *world) network(n *worldNetwork) winkernel.Network {
	out := winkernel.Network{ID: n.ID, Name: w.Config.NetworkName, Type: winkernel.L2Bridge}
	if strings.EqualFold(n.Type, "overlay") {
		out.Type = winkernel.Overlay
	}
	for _, s := range n.RemoteSubnets {
		out.RemoteSubnets = append(out.RemoteSubnets, winkernel.RemoteSubnet{Prefix: s.Prefix, Provider: s.ProviderAddress})
	}
	return out
}

func (e *worldEndpoint) endpoint() winkernel.Endpoint {
	return winkernel.Endpoint{Name: e.Name, Addrs: e.IPs, Remote: e.Remote, Provider: e.ProviderAddress,
		MAC: strings.ToLower(strings.ReplaceAll(e.MAC, ":", "-"))}
}

// lb returns the load balancer, with the IDs that id returns for its endpoints. A load balancer
// that is half made has no port.
func (l *worldLB) lb(id func(netip.Addr) string) winkernel.LoadBalancer {
	out := winkernel.LoadBalancer{InternalPort: l.InternalPort, DSR: slices.Contains(l.Flags, "DSR"),
		ClientAffinity: l.Distribution == "SourceIP"}
	if l.Protocol != "" {
		out.Frontend = winkernel.Frontend{Port: l.ExternalPort, Protocol: v1.Protocol(l.Protocol), Family: tracker.IPv4}
	}
	if l.VIP != "" && l.Protocol != "" {
		out.Frontend.VIP = netip.MustParseAddr(l.VIP)
	}
	if slices.Contains(l.Flags, "IPv6") {
		out.Frontend.Family = tracker.IPv6
	}
	if l.SourceVIP != "" {
		out.SourceVIP = netip.MustParseAddr(l.SourceVIP)
	}
	for _, f := range portFlags {
		if slices.Contains(l.PortFlags, f.name) {
			out.Flags |= f.flag
		}
	}
	for _, a := range l.Endpoints {
		out.Endpoints = append(out.Endpoints, id(a))
	}
	slices.Sort(out.Endpoints)
	return out
}

// portFlags holds the names of flags in worlds.
var portFlags = []struct {
	name string
	flag winkernel.PortFlags
}{
	{"LocalRoutedVIP", winkernel.LocalRoutedVIP}, {"UseMux", winkernel.UseMux},
	{"PreserveDIP", winkernel.PreserveDIP}, {"VipExternalIP", winkernel.VIPExternalIP},
}

// apply passes an object to the tracker.
func apply(t *tracker.Tracker, raw json.RawMessage) error {
	var kind struct{ Kind string }
	if err := json.Unmarshal(raw, &kind); err != nil {
		return err
	}
	var err error
	switch kind.Kind {
	case "Service":
		s := &v1.Service{}
		if err = json.Unmarshal(raw, s); err == nil {
			t.SetService(s)
		}
	case "EndpointSlice":
		s := &discovery.EndpointSlice{}
		if err = json.Unmarshal(raw, s); err == nil {
			t.SetSlice(s)
		}
	case "Node":
		n := &v1.Node{}
		if err = json.Unmarshal(raw, n); err == nil {
			t.SetNode(tracker.NodeInfoOf(n))
		}
	default:
		err = fmt.Errorf("object of kind %q", kind.Kind)
	}
	return err
}

// code returns the error of an HRESULT.
func code(text string) error {
	n, err := strconv.ParseUint(text, 0, 32)
	if err != nil {
		return err
	}
	return winkernel.Code(n)
}
