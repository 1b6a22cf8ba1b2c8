package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) { netlab.Main(m) }

func TestSmoke(t *testing.T) {
	netlab.Require(t)
	lab, err := netlab.New()
	if err != nil {
		t.Fatal(err)
	}
	defer lab.Close()
	h, err := lab.Host("node")
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(Config{NetNS: h.FD()})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a", Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.1")}}})
	if err != nil {
		t.Fatal(err)
	}
	tcp := v1.ProtocolTCP
	port := int32(8080)
	name := "p"
	ready := true
	for i := range 3 {
		svc := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("svc", i)}, Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ClusterIP: fmt.Sprint("10.96.0.", 10+i), ClusterIPs: []string{fmt.Sprint("10.96.0.", 10+i)}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Name: "p", Port: 80, Protocol: tcp, TargetPort: intstr.FromInt(8080), NodePort: int32(30000 + i)}},
		}, Status: v1.ServiceStatus{LoadBalancer: v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{{IP: fmt.Sprint("192.0.2.", i)}}}}}
		if i == 1 {
			svc.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			svc.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8", "1.2.3.4/32"}
		}
		if i == 2 {
			svc.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}
		tr.SetService(svc)
		es := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("svc", i), Labels: map[string]string{"kubernetes.io/service-name": fmt.Sprint("svc", i)}},
			AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}}}
		for e := range 2 + i*17 {
			node := "node-b"
			if e%2 == 0 {
				node = "node-a"
			}
			es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.244.%d.%d", i, e)}, NodeName: &node, Conditions: discovery.EndpointConditions{Ready: &ready}})
		}
		tr.SetSlice(es)
	}
	tr.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
	e, err := ruleset.NewEngine(ruleset.Config{Tracker: tr, LocalTraffic: ruleset.LocalTraffic{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}})
	if err != nil {
		t.Fatal(err)
	}
	c := e.Attach("nft", b)
	if err := c.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	out, err := h.Output("nft", "list", "ruleset")
	t.Log(out, err)
	c.Resync()
	if err := c.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	b.tables = nil
	c.Resync()
	if err := c.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	tr.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc1"})
	if err := c.Sync(context.Background()); err != nil {
		t.Fatal(err)
	}
	out, err = h.Output("nft", "list", "ruleset")
	t.Log(out, err)
}

func TestAttr(t *testing.T) {
	lab, _ := netlab.New()
	defer lab.Close()
	h, _ := lab.Host("x")
	b, err := New(Config{NetNS: h.FD()})
	if err != nil {
		t.Fatal(err)
	}
	w := newWriter("proxier", 1)
	tt := newTable(tracker.IPv4, &ruleset.Node{NodePorts4: ruleset.NodePorts{All: true}})
	tt.measure(nil, 100)
	w.newTable(tt)
	tt.skeleton(w)
	ba, _ := w.finish([]*table{tt})
	if err := b.conn.Commit(ba); err != nil {
		t.Fatal(err)
	}
	fmt.Println(b.setCounts(tracker.IPv4))
}
