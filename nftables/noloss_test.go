//go:build linux

package nftables

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) {
	confine.Roles{"everything": everything, "faults": faults}.Enter()
	if spec := os.Getenv(agentEnv); spec != "" {
		fmt.Fprintln(os.Stderr, runAgent(spec))
		os.Exit(1)
	}
	netlab.Parallel(6)
	netlab.Main(m)
}

// busy is a dual-stack Service whose endpoints change all the time. Every pod of the world serves
// all the time, so that no connection may fail.
type busy struct {
	Pods4, Pods6 []netip.Addr
	Port         uint16
}

func busyIn(w *conformance.World) busy {
	var s busy
	for _, p := range w.Pods() {
		s.Pods4 = append(s.Pods4, p.Addr(tracker.IPv4))
		s.Pods6 = append(s.Pods6, p.Addr(tracker.IPv6))
		s.Port = p.Ports()[0]
	}
	return s
}

func (s busy) service(edits ...func(*v1.Service)) *v1.Service {
	out := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "busy"},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeNodePort, ClusterIP: "10.96.0.50", ClusterIPs: []string{"10.96.0.50", "fd00:10:96::50"},
			IPFamilies: []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
			Ports: []v1.ServicePort{
				{Name: "tcp", Port: 80, Protocol: v1.ProtocolTCP, NodePort: 30050},
				{Name: "udp", Port: 80, Protocol: v1.ProtocolUDP},
			},
		},
	}
	for _, edit := range edits {
		edit(out)
	}
	return out
}

// targets returns the frontends of the Service.
func (s busy) targets() []conformance.Target {
	vip4, vip6 := netip.MustParseAddrPort("10.96.0.50:80"), netip.MustParseAddrPort("[fd00:10:96::50]:80")
	return []conformance.Target{
		{Addr: vip4, Protocol: v1.ProtocolTCP},
		{Addr: vip6, Protocol: v1.ProtocolTCP},
		{Addr: vip4, Protocol: v1.ProtocolUDP},
		{Addr: netip.MustParseAddrPort("192.0.2.1:30050"), Protocol: v1.ProtocolTCP},
	}
}

// slices returns the Service's EndpointSlices with some of the pods, at least one.
func (s busy) slices(rng *rand.Rand) []*discovery.EndpointSlice {
	chosen := rng.Perm(len(s.Pods4))[:1+rng.IntN(len(s.Pods4))]
	var out []*discovery.EndpointSlice
	for typ, pods := range map[discovery.AddressType][]netip.Addr{discovery.AddressTypeIPv4: s.Pods4, discovery.AddressTypeIPv6: s.Pods6} {
		es := &discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "busy-" + string(typ), Labels: map[string]string{discovery.LabelServiceName: "busy"}},
			AddressType: typ,
		}
		port := int32(s.Port)
		for _, p := range s.service().Spec.Ports {
			es.Ports = append(es.Ports, discovery.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &port})
		}
		for _, i := range chosen {
			es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{pods[i].String()}})
		}
		out = append(out, es)
	}
	return out
}

func (s busy) hand(t *tracker.Tracker, rng *rand.Rand) {
	for _, es := range s.slices(rng) {
		t.SetSlice(es)
	}
}

// TestNoConnectionIsLost opens connections from outside and from a pod, to cluster IPs and a
// NodePort, during everything that a node agent does.
func TestNoConnectionIsLost(t *testing.T) {
	t.Parallel()
	changes, rounds := 100, 10
	if testtime.Thorough() {
		changes, rounds = 2000, 50
	}
	w, s, b := busyWorld(t)
	rng := rand.New(rand.NewPCG(1, 3))

	during := func(what string, f func()) {
		t.Helper()
		start := time.Now()
		c := w.Churn(s.targets(), f)
		t.Logf("%s: %d connections in %v, %d failed", what, c.Opened, time.Since(start).Round(time.Millisecond), len(c.Failures))
		for _, err := range c.Failures[:min(len(c.Failures), 5)] {
			t.Errorf("%s: %v", what, err)
		}
	}
	during(fmt.Sprintf("%d endpoint changes", changes), func() {
		for range changes {
			s.hand(w.Tracker, rng)
			w.Sync()
		}
	})
	during(fmt.Sprintf("%d full resyncs", rounds), func() {
		for range rounds {
			w.Cursor.Resync()
			w.Sync()
		}
	})
	during(fmt.Sprintf("%d full resyncs by a staging table", rounds), func() {
		limitTo(t, b, 20<<10) // the skeletons fit, and little more
		defer limitTo(t, b, 0)
		for range rounds {
			w.Cursor.Resync()
			w.Sync()
		}
	})
	if _, err := exec.LookPath("nft"); err == nil {
		during(fmt.Sprintf("%d tables of an older layout replaced", rounds/2), func() {
			for range rounds / 2 {
				makeOlder(t, w.Do, b.name)
				w.Cursor.Resync()
				w.Sync()
			}
		})
	}
	// Another backend writes the tables.
	takenOver(t, w)
	// Connections fail while there is no table. Afterwards, none may fail.
	if err := b.Check(t.Context()); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Errorf("another backend wrote the tables, and Check returned %v", err)
	}
	w.Cursor.Resync()
	w.Sync()
	ctx, stop := context.WithCancel(t.Context())
	repaired := make(chan error)
	go b.Watch(ctx, time.Millisecond, func(err error) {
		stop()
		w.Cursor.Resync()
		repaired <- errors.Join(errors.Unwrap(err), w.Cursor.Sync(context.Background()))
	})
	must.Do(t, Cleanup(t.Context(), Config{NetNS: w.Env.NetNS}))
	if err := <-repaired; err.Error() != ruleset.ErrNeedFull.Error() {
		t.Fatal(err)
	}
	during("after the tables were deleted and repaired", func() { time.Sleep(200 * time.Millisecond) })
}

// agentEnv is an environment variable that describes a Service. It makes the test binary an agent
// for that Service.
const agentEnv = "PROXIER_TEST_AGENT"

// runAgent changes the Service's endpoints as fast as it can until it is killed.
func runAgent(spec string) error {
	var s busy
	if err := json.Unmarshal([]byte(spec), &s); err != nil {
		return err
	}
	b, err := New(context.Background(), Config{})
	if err != nil {
		return err
	}
	if os.Getenv(smallEnv) == "1" {
		if err := b.limitTo(20 << 10); err != nil { // the skeletons fit, and little more
			return err
		}
	}
	p, err := newAgent(b)
	if err != nil {
		return err
	}
	p.tracker.SetService(s.service())
	rng := rand.New(rand.NewPCG(uint64(os.Getpid()), 1))
	for i := 0; ; i++ {
		s.hand(p.tracker, rng)
		if i%7 == 6 {
			p.cursor.Resync()
		}
		if err := p.cursor.Sync(context.Background()); err != nil {
			return err
		}
		if i == 0 {
			fmt.Println("ready")
		}
	}
}
