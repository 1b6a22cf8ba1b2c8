//go:build linux

package ipvs

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// testHostileServicesAreServed sets Services that are larger than any real one, and Services with
// hostile names. They must be served, other Services must not be affected, and no part of a name
// may reach the rules.
func testHostileServicesAreServed(t *testing.T) {
	ports, endpoints := int32(60), 500
	if *thousands {
		ports, endpoints = 2000, 10000
	}
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(0), 0, -1, -2)
	// etcd has no room for such an object.
	many := svc(1)
	many.Spec.Ports = nil
	es := slice(1, v1.ProtocolTCP, 1, -2)
	es.Ports = nil
	for p := range ports {
		name, number, proto := fmt.Sprint("p", p), 8000+p, v1.ProtocolTCP
		many.Spec.Ports = append(many.Spec.Ports, v1.ServicePort{Name: name, Port: 1 + p, Protocol: proto})
		es.Ports = append(es.Ports, discovery.EndpointPort{Name: &name, Port: &number, Protocol: &proto})
	}
	r.tracker.SetService(many)
	r.tracker.SetSlice(es)
	r.tracker.SetService(svc(2))
	for n := range endpoints / 500 {
		es := slice(2, v1.ProtocolTCP)
		es.Name = fmt.Sprint(es.Name, "-", n)
		for i := range 500 {
			es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 128+n, i>>8, i&255)}})
		}
		r.tracker.SetSlice(es)
	}
	r.sync()
	r.agree()
	rng := rand.New(rand.NewPCG(3, 3))
	for i, name := range []string{"a\" -j ACCEPT", "a\nCOMMIT\n*filter\n-P INPUT DROP", "'`$(reboot)`", "-A", "!", "", strings.Repeat("x", 5000), "\x00", "ü", "# c", "KUBE-CLUSTER-IP"} {
		s := svc(10+i, nodePort(int32(30010+i)), externalLocal)
		s.Namespace, s.Name, s.Spec.Ports[0].Name = name, name, name
		s.Annotations = map[string]string{name: name}
		es := slice(10+i, v1.ProtocolTCP, 1+rng.IntN(9), -3)
		es.Namespace, es.Name, es.Labels[discovery.LabelServiceName], es.Ports[0].Name = name, name, name, &name
		es.Endpoints[1].NodeName, es.Endpoints[1].Zone = &name, &name
		r.tracker.SetService(s)
		r.tracker.SetSlice(es)
	}
	rules := withoutComments(r.run("iptables-save -t mangle"))
	r.cursor.Resync()
	r.sync()
	r.agree()
	r.same("rules", withoutComments(r.run("iptables-save -t mangle")), rules)
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
	// A node whose interface name contains a rule changes nothing.
	before := r.run("ipvsadm -Sn")
	d := &ruleset.Delta{Full: true, Node: &ruleset.Node{LocalTraffic: ruleset.LocalTraffic{Bridge: "br0 -j ACCEPT"}}}
	if err := r.backend.Apply(context.Background(), d); err == nil || !strings.Contains(err.Error(), "interface name") {
		t.Errorf("a bridge whose name contains a rule: %v", err)
	}
	r.same("virtual servers after a refused delta", r.run("ipvsadm -Sn"), before)
}
