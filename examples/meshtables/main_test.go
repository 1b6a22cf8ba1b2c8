package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/go-proxier/proxier/internal/testing/must"
)

func node(name, zone string) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelTopologyZone: zone}}}
}

// service returns a Service whose cluster IP follows from the first letter of its name.
func service(name string, policy v1.ServiceInternalTrafficPolicy) *v1.Service {
	ip := fmt.Sprint("10.96.0.", name[0])
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec: v1.ServiceSpec{
			ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Name: "http", Port: 80}}, InternalTrafficPolicy: &policy,
		},
	}
}

// slice has one endpoint 10.0.0.N in each zone "zN", on "node-N"; the last one is not ready if unready is set.
func slice(name string, hints, unready bool, zones ...int) *discovery.EndpointSlice {
	port, portName := int32(8080), "http"
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: name + "-1", Labels: map[string]string{discovery.LabelServiceName: name}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &portName, Port: &port}},
	}
	for i, z := range zones {
		zone, node, ready := fmt.Sprint("z", z), fmt.Sprint("node-", z), !unready || i != len(zones)-1
		ep := discovery.Endpoint{Addresses: []string{fmt.Sprint("10.0.0.", z)}, Zone: &zone, NodeName: &node, Conditions: discovery.EndpointConditions{Ready: &ready}}
		if hints {
			ep.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: zone}}}
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
	return s
}

// control is a running program.
type control struct {
	t      *testing.T
	url    string
	client *fake.Clientset
}

func start(t *testing.T, client *fake.Clientset) *control {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- run(ctx, client, l, slog.New(slog.NewTextHandler(t.Output(), nil))) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != context.Canceled {
			t.Errorf("run returned %v", err)
		}
	})
	return &control{t, "http://" + l.Addr().String(), client}
}

// table returns a node's table as "NAME: ZONE ADDRESSES, …" by its version, or "" after the time.
func (c *control) table(node string, after uint64, wait time.Duration) (string, uint64) {
	ctx, cancel := context.WithTimeout(c.t.Context(), wait)
	defer cancel()
	r := must.Get(http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("%s/endpoints/%s?after=%d", c.url, node, after), nil))(c.t)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return "", 0
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	var a answer
	if resp.StatusCode != 200 || json.Unmarshal(text, &a) != nil {
		return "", 0
	}
	var out []string
	for _, cl := range a.Clusters {
		line := cl.Name + ":"
		for _, l := range cl.Endpoints {
			line += " " + l.Locality.Zone
			for _, ep := range l.Endpoints {
				line += " " + ep.Address
			}
		}
		out = append(out, line)
	}
	return strings.Join(out, ", "), a.Version
}

// until asks until a node has a table, and returns its version.
func (c *control) until(node, want string) uint64 {
	c.t.Helper()
	var got string
	var version uint64
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if got, version = c.table(node, version, 10*time.Second); got == want {
			return version
		}
	}
	c.t.Fatalf("%s has %q, want %q", node, got, want)
	return 0
}

func TestTablesFollowTopology(t *testing.T) {
	t.Parallel()
	c := start(t, fake.NewClientset(
		node("node-1", "z1"), node("node-2", "z2"), node("node-3", "z3"),
		service("zones", v1.ServiceInternalTrafficPolicyCluster), slice("zones", true, false, 1, 2, 3),
		service("local", v1.ServiceInternalTrafficPolicyLocal), slice("local", false, false, 1, 2),
		service("plain", v1.ServiceInternalTrafficPolicyCluster), slice("plain", false, true, 1, 2),
	))
	const plain = ", shop/plain:http/TCP/IPv4: z1 10.0.0.1:8080, shop/zones:http/TCP/IPv4: "
	c.until("node-1", "shop/local:http/TCP/IPv4: z1 10.0.0.1:8080"+plain+"z1 10.0.0.1:8080")
	two := c.until("node-2", "shop/local:http/TCP/IPv4: z2 10.0.0.2:8080"+plain+"z2 10.0.0.2:8080")
	three := c.until("node-3", "shop/local:http/TCP/IPv4:"+plain+"z3 10.0.0.3:8080")

	// A change that only node-2 sees answers only its request.
	woken := make(chan uint64)
	go func() {
		_, v := c.table("node-2", two, time.Minute)
		woken <- v
	}()
	must.Get(c.client.DiscoveryV1().EndpointSlices("shop").Update(t.Context(), slice("local", false, false, 1), metav1.UpdateOptions{}))(t)
	if v := <-woken; v <= two {
		t.Errorf("version %d after %d", v, two)
	}
	if got, v := c.table("node-3", three, 200*time.Millisecond); v != 0 {
		t.Errorf("node-3 was told %q, which it had", got)
	}
	// A node that moves to another zone, one that joins, and one whose last version is of an earlier process.
	moved := node("node-3", "z1")
	must.Get(c.client.CoreV1().Nodes().Update(t.Context(), moved, metav1.UpdateOptions{}))(t)
	c.until("node-3", "shop/local:http/TCP/IPv4:"+plain+"z1 10.0.0.1:8080")
	must.Get(c.client.CoreV1().Nodes().Create(t.Context(), node("node-4", "z2"), metav1.CreateOptions{}))(t)
	c.until("node-4", "shop/local:http/TCP/IPv4:"+plain+"z2 10.0.0.2:8080")
	if got, v := c.table("node-4", 1<<40, 10*time.Second); v == 0 {
		t.Errorf("a proxy with an earlier version gets %q", got)
	}
	if got, v := c.table("node-9", 0, 200*time.Millisecond); v != 0 {
		t.Errorf("an unknown node gets %q", got)
	}
}
