package dataplane

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// logging returns a world and what its Backend logs.
func logging(t *testing.T, c Config) (*world, *bytes.Buffer) {
	t.Helper()
	out := &bytes.Buffer{}
	c.Log = slog.New(slog.NewTextHandler(out, nil))
	return newWorld(t, c), out
}

// TestSCTPServiceIsReportedOnce has a Service with 2,000 ports and an endpoint that comes and goes.
func TestSCTPServiceIsReportedOnce(t *testing.T) {
	t.Parallel()
	w, logged := logging(t, Config{})
	const ports = 2000
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "sctp"},
		Spec:       v1.ServiceSpec{ClusterIP: "127.0.0.1", ClusterIPs: []string{"127.0.0.1"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol}},
	}
	es := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "sctp", Labels: map[string]string{discovery.LabelServiceName: "sctp"}},
		AddressType: discovery.AddressTypeIPv4,
	}
	sctp := v1.ProtocolSCTP
	for i := range ports {
		name, port := fmt.Sprint("p", i), int32(1+i)
		s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: name, Port: port, Protocol: sctp})
		es.Ports = append(es.Ports, discovery.EndpointPort{Name: &name, Port: &port, Protocol: &sctp})
	}
	w.tracker.SetService(s)
	for i := range 5 {
		now := es.DeepCopy()
		now.Endpoints = []discovery.Endpoint{{Addresses: []string{fmt.Sprint("10.0.0.", 1+i%2)}}}
		w.tracker.SetSlice(now)
		w.sync()
	}
	if n := len(w.engine.Snapshot().Ports); n != ports {
		t.Fatalf("%d ports", n)
	}
	if n := strings.Count(logged.String(), "\n"); n != 1 {
		t.Errorf("%d lines, of them the first are\n%.1000s", n, logged)
	}
}

// TestTakenPortIsReportedOnce has a NodePort that another program uses, and a Service that comes and
// goes at the NodePort's address and port.
func TestTakenPortIsReportedOnce(t *testing.T) {
	t.Parallel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	logged := &bytes.Buffer{}
	w := newNodePort(t, Config{Log: slog.New(slog.NewTextHandler(logged, nil))}, port)
	for range 50 {
		w.service("flapping", tcp, port)
		_ = w.cursor.Sync(t.Context()) // the NodePort fails
		w.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "flapping"})
		_ = w.cursor.Sync(t.Context())
	}
	if n := strings.Count(logged.String(), "cannot listen"); n != 1 || !strings.Contains(logged.String(), "ns/node-port") {
		t.Errorf("%d lines, of them the first are\n%.1000s", n, logged)
	}
}

// TestListenerAtTheNodesAddressKeepsIt has a program at a cluster IP that it has added to the node, as
// node-local-dns does. That is no failure, and when the program ends, the Service is served.
func TestListenerAtTheNodesAddressKeepsIt(t *testing.T) {
	t.Parallel()
	for _, proto := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
		w, log := logging(t, Config{Addresses: onlyLoopback{}})
		at := netip.AddrPortFrom(localhost, freePort(t, strings.ToLower(string(proto))))
		var program io.Closer
		var err error
		if proto == v1.ProtocolTCP {
			program, err = net.Listen("tcp", at.String())
		} else {
			program, err = net.ListenPacket("udp", at.String())
		}
		if err != nil {
			t.Fatal(err)
		}
		w.service("dns", proto, at.Port())
		w.endpoints("dns", proto, netip.MustParseAddrPort("127.0.0.1:9"))
		w.sync()
		w.cursor.Resync()
		w.sync()
		if n := strings.Count(log.String(), "left to the program that listens there"); n != 1 || w.backend.Listens(at, proto) {
			t.Errorf("%s: log %q, listens %t", proto, log.String(), w.backend.Listens(at, proto))
		}
		program.Close()
		w.cursor.Resync()
		w.sync()
		if !w.backend.Listens(at, proto) {
			t.Errorf("%s: not served after the program ended", proto)
		}
	}
}
