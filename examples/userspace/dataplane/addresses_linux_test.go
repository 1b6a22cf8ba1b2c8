package dataplane

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestNodeHoldsTheAddressesOfServices also checks that addresses that an earlier process held
// are released, that interfaces keep their own addresses, and that an external IP takes
// precedence over a NodePort.
func TestNodeHoldsTheAddressesOfServices(t *testing.T) {
	t.Parallel()
	var b *Backend
	w := conformance.NewWorld(t, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b = inWorld(tb, env, Config{Drain: time.Hour})
		return b
	}})
	const external, own, stray = "203.0.113.7", "192.0.2.1", "203.0.113.99"
	created := map[string]metav1.Time{"a": metav1.Unix(2, 0), "b": metav1.Unix(1, 0)} // the older one gets the port
	service := func(name, ip string, nodePort int32, externalIPs ...string) {
		w.Tracker.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, CreationTimestamp: created[name]},
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeNodePort, ClusterIP: ip, ClusterIPs: []string{ip},
				Ports: []v1.ServicePort{{Port: 80, NodePort: nodePort}}, ExternalIPs: externalIPs,
			},
		})
	}
	pod := map[string]string{}
	for i, name := range []string{"a", "b"} {
		p := w.Pods()[i]
		pod[name] = p.Addr(tracker.IPv4).String()
		unnamed, port := "", int32(p.Ports()[0])
		w.Tracker.SetSlice(&discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{discovery.LabelServiceName: name}},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: &unnamed, Port: &port}},
			Endpoints:   []discovery.Endpoint{{Addresses: []string{pod[name]}}},
		})
	}
	held := func(want ...string) {
		t.Helper()
		list, err := b.config.Addresses.Held()
		var got []string
		for _, a := range list {
			got = append(got, a.String())
		}
		slices.Sort(got)
		if slices.Sort(want); err != nil || !slices.Equal(got, want) {
			t.Errorf("held %v, %v; want %v", got, err, want)
		}
	}
	open := func(to string) net.Conn {
		t.Helper()
		var c net.Conn
		must.Do(t, w.Do(func() (err error) {
			c, err = (&net.Dialer{Timeout: testtime.Timeout}).DialContext(context.Background(), "tcp", to)
			return err
		}))
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(testtime.Timeout))
		return c
	}
	reaches := func(to, name string) {
		t.Helper()
		buf := make([]byte, 100)
		c := open(to)
		n, err := c.Read(buf)
		if at, perr := netip.ParseAddrPort(string(buf[:max(0, slices.Index(buf[:n], ' '))])); err != nil || perr != nil || at.Addr().String() != pod[name] {
			t.Errorf("%s reaches %q, %v; want %s (%s)", to, buf[:n], err, name, pod[name])
		}
	}

	must.Do(t, b.config.Addresses.Hold(netip.MustParseAddr(stray)))
	service("a", "10.96.0.1", 80, external)
	service("b", "10.96.0.2", 30081)
	w.Sync()
	held("10.96.0.1", "10.96.0.2", external)
	reaches(external+":80", "a")
	reaches(own+":80", "a") // its NodePort

	service("b", "10.96.0.2", 30081, own)
	w.Sync()
	held("10.96.0.1", "10.96.0.2", external)
	reaches(own+":80", "b")
	kept, greeting := open(own+":80"), make([]byte, 100)
	must.Get(kept.Read(greeting))(t)
	service("b", "10.96.0.2", 30081)
	w.Sync()
	reaches(own+":80", "a")
	kept.Write([]byte("x"))
	if _, err := kept.Read(greeting); err != nil {
		t.Errorf("a connection through an address that the node keeps: %v", err)
	}

	// A full resync restores an address that another process removed.
	must.Do(t, b.config.Addresses.Release(netip.MustParseAddr(external)))
	w.Cursor.Resync()
	w.Sync()
	held("10.96.0.1", "10.96.0.2", external)
	reaches(external+":80", "a")

	// The removal of an address ends its connections, and no others.
	c, other := open(external+":80"), open("10.96.0.1:80")
	buf := make([]byte, 100)
	for _, x := range []net.Conn{c, other} {
		must.Get(x.Read(buf))(t)
	}
	service("a", "10.96.0.1", 80)
	w.Sync()
	held("10.96.0.1", "10.96.0.2")
	if _, err := c.Read(buf); !ended(err) {
		t.Errorf("a connection through the removed address: %v", err)
	}
	other.Write([]byte("x"))
	if _, err := other.Read(buf); err != nil {
		t.Errorf("a connection through another address: %v", err)
	}
	must.Do(t, w.Do(b.Close))
	held()
}
