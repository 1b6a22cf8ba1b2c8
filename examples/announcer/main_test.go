//go:build linux

package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables"
)

func TestMain(m *testing.M) { netlab.Main(m) }

const vip = "203.0.113.1"

func service() *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Port: 80}}, ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal,
		},
		Status: v1.ServiceStatus{LoadBalancer: v1.LoadBalancerStatus{Ingress: []v1.LoadBalancerIngress{{IP: vip}}}},
	}
}

// slice has the pods at "a" and "b"; those with "-" behind terminate and serve.
func slice(pods ...string) *discovery.EndpointSlice {
	port, name := int32(8080), ""
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &name, Port: &port}},
	}
	for _, p := range pods {
		node, ends := strings.CutSuffix(p, "-")
		ready, serving := !ends, true
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses: []string{map[string]string{"a": "10.11.0.2", "b": "10.12.0.2"}[node]}, NodeName: &node,
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &ends},
		})
	}
	return s
}

// agent starts an announcer on a host and returns what it says.
func agent(t *testing.T, h *netlab.Host, name string, client *fake.Clientset) *bufio.Scanner {
	r, w := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- run(ctx, client, name, nil, nftables.Config{NetNS: h.File(), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}, w)
	}()
	t.Cleanup(func() {
		cancel()
		r.Close()
		if err := <-done; ctx.Err() == nil {
			t.Error(err)
		}
	})
	return bufio.NewScanner(r)
}

// TestTwoNodesAnnounceByTurns has a router, which is the client, and two nodes with a pod each. The test is
// the routing protocol: it gives the router the route that the nodes announce.
func TestTwoNodesAnnounceByTurns(t *testing.T) {
	lab, h := netlab.NewHosts(t, "router", "a", "b", "pod-a", "pod-b")
	for i, name := range []string{"a", "b"} {
		lab.Link(h["router"], name, h[name], "router")
		h["router"].Addrs(name, fmt.Sprintf("10.%d.0.2/24", i+1))
		h[name].Addrs("router", fmt.Sprintf("10.%d.0.1/24", i+1))
		lab.Link(h[name], "pod", h["pod-"+name], "eth0")
		h[name].Addrs("pod", fmt.Sprintf("10.1%d.0.1/24", i+1))
		h["pod-"+name].Addrs("eth0", fmt.Sprintf("10.1%d.0.2/24", i+1))
		h["pod-"+name].Routes("", fmt.Sprintf("10.1%d.0.1", i+1), "0.0.0.0/0")
		h[name].Routes("", fmt.Sprintf("10.%d.0.2", i+1), "0.0.0.0/0")
		h[name].Forward()
	}
	for _, name := range []string{"a", "b"} {
		h["pod-"+name].ServeTCP(t, ":8080", func(c net.Conn) { fmt.Fprint(c, name) })
	}
	client := fake.NewClientset(service(), slice("a"))
	speakers := map[string]*bufio.Scanner{"a": agent(t, h["a"], "a", client), "b": agent(t, h["b"], "b", client)}

	says := func(node, want string) {
		t.Helper()
		if s := speakers[node]; !s.Scan() || s.Text() != want {
			t.Fatalf("%s says %q, want %q", node, s.Text(), want)
		}
	}
	route := func(node string) { // what a router learns from the announcement
		t.Helper()
		via := map[string]string{"a": "10.1.0.1", "b": "10.2.0.1"}[node]
		must.Do(t, h["router"].AddRoute(netip.MustParsePrefix(vip+"/32"), netip.MustParseAddr(via), ""))
	}
	asks := func(want string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
		defer cancel()
		c, err := h["router"].Dial(ctx, "tcp", "", vip+":80")
		if err != nil {
			t.Fatalf("no answer, want that of %s: %v", want, err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(testtime.Timeout))
		if got, _ := io.ReadAll(c); string(got) != want {
			t.Errorf("answered by %q, want %s", got, want)
		}
	}
	move := func(pods ...string) {
		t.Helper()
		must.Get(client.DiscoveryV1().EndpointSlices("shop").Update(t.Context(), slice(pods...), metav1.UpdateOptions{}))(t)
	}

	says("a", "announce "+vip+" shop/web")
	says("b", "withdraw "+vip)
	route("a")
	asks("a")
	// The pod of a terminates, and one at b is ready: a still serves what arrives before the router knows.
	move("a-", "b")
	says("a", "withdraw "+vip)
	says("b", "announce "+vip+" shop/web")
	asks("a")
	route("b")
	asks("b")
	move()
	says("b", "withdraw "+vip)
}
