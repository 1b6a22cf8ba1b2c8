package core

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/metrics"
	userspace "github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestFlappingNodePortIsReportedOnce has NodePorts that come and go, and another program at their
// port of the loopback address.
func TestFlappingNodePortIsReportedOnce(t *testing.T) {
	taken := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	ports := must.Get(ruleset.ParseNodePortAddresses([]string{"localhost"}))(t)
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node"}}))(t)
	engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr, NodePortAddresses: ports}))(t)
	var logged bytes.Buffer
	l := &localhost{complaints: complaint.NewLog(slog.New(slog.NewTextHandler(&logged, nil)))}
	serves := func(f *ruleset.Frontend, _ v1.Protocol, _ netip.AddrPort) bool { return f.Kind == ruleset.KindNodePort }
	l.plane = userspace.New(userspace.Config{Addresses: loopbackAddresses{config.Loopback(tracker.IPv4)}, Serves: serves})
	l.failed, l.rejected = metrics.NewSet(metrics.Config{}).WatchLocalhostNodePorts([]tracker.Family{tracker.IPv4}, l.plane.Sockets)
	cursor := engine.Attach("localhost", ruleset.BackendFunc(l.apply))
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	failures := 0
	for i := range 200 {
		s := &v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("s", i%100)},
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeNodePort, ClusterIP: fmt.Sprint("10.96.0.", i%100), IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
				Ports: []v1.ServicePort{{Port: 80, NodePort: int32(port), Protocol: v1.ProtocolTCP}},
			},
		}
		s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
		tr.SetService(s)
		endpointPort, name := int32(8080), ""
		tr.SetSlice(&discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: s.Name, Labels: map[string]string{discovery.LabelServiceName: s.Name}},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: &name, Port: &endpointPort}},
			Endpoints:   []discovery.Endpoint{{Addresses: []string{"10.244.0.1"}}},
		})
		if err := cursor.Sync(t.Context()); err != nil {
			failures++
		}
		tr.DeleteService(types.NamespacedName{Namespace: "ns", Name: s.Name})
		must.Do(t, cursor.Sync(t.Context()))
	}
	if failures != 200 {
		t.Fatalf("%d failures", failures)
	}
	if n := strings.Count(logged.String(), "\n"); n < 20 || n > 25 {
		t.Errorf("%d lines, want 20 in one namespace:\n%.2000s", n, &logged)
	}
}
