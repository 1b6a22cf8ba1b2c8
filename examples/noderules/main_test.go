//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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
	"github.com/go-proxier/proxier/ruleset"
)

func TestMain(m *testing.M) { netlab.Main(m) }

func nodeObject(name string) *v1.Node { return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }

func service(name string, policy v1.ServiceInternalTrafficPolicy) *v1.Service {
	ip := fmt.Sprint("10.96.0.", name[0])
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec: v1.ServiceSpec{
			ClusterIP: ip, ClusterIPs: []string{ip}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Port: 80}}, InternalTrafficPolicy: &policy,
		},
	}
}

// slice has an endpoint 10.0.X.1 for each of the nodes "node-X".
func slice(name string, nodes ...string) *discovery.EndpointSlice {
	port, portName := int32(8080), ""
	s := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: name + "-1", Labels: map[string]string{discovery.LabelServiceName: name}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &portName, Port: &port}},
	}
	for _, n := range nodes {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%s.1", strings.TrimPrefix(n, "node-"))}, NodeName: &n})
	}
	return s
}

// start runs the controller until stop is called.
func start(t *testing.T, client *fake.Clientset, dir string, stages ...nftables.Stages) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		local := ruleset.LocalTraffic{CIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}
		done <- run(ctx, client, local, slices.Concat(stages, make([]nftables.Stages, 1))[0], dir, slog.New(slog.NewTextHandler(t.Output(), nil)))
	}()
	return func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("run returned %v", err)
		}
	}
}

func files(t *testing.T, dir, node string) []string {
	all := must.Get(filepath.Glob(filepath.Join(dir, node, "*.nft")))(t)
	slices.Sort(all)
	return all
}

func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(testtime.Timeout); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not %s in time", what)
		}
	}
}

// elements matches cluster IPs and endpoints in the listing of a table.
var elements = regexp.MustCompile(`[\d.]+ \. (tcp \. 80|8080)\b`)

// TestFilesMakeTheRulesOfEachNode applies the files of two nodes by nft as they come. At the end the tables must have the
// elements of a full file, and each node must have its own endpoint of a Service with policy Local.
func TestFilesMakeTheRulesOfEachNode(t *testing.T) {
	t.Parallel()
	_, hosts := netlab.NewHosts(t, "node-1", "node-2")
	netlab.NeedPrograms(t, "nft")
	client := fake.NewClientset(
		nodeObject("node-1"), nodeObject("node-2"),
		service("local", v1.ServiceInternalTrafficPolicyLocal), slice("local", "node-1", "node-2"),
		service("plain", v1.ServiceInternalTrafficPolicyCluster), slice("plain", "node-1"),
	)
	dir := t.TempDir()
	stop := start(t, client, dir)
	applied := map[string]int{}
	listing := func(name string) string {
		t.Helper()
		for _, f := range files(t, dir, name)[applied[name]:] {
			must.Get(hosts[name].Run(t, "nft", "-f", f))(t)
			applied[name]++
		}
		out := must.Get(hosts[name].Run(t, "nft", "list", "ruleset"))(t)
		return out
	}
	const other, own = "10.0.2.1", "10.0.1.1"
	until(t, "both nodes have rules", func() bool { return len(files(t, dir, "node-1")) > 0 && len(files(t, dir, "node-2")) > 0 })
	if one := listing("node-1"); strings.Contains(one, other) || !strings.Contains(one, own) {
		t.Errorf("node-1 has the endpoints of another node:\n%s", one)
	}
	until(t, "node-2 has its endpoint", func() bool { return strings.Contains(listing("node-2"), other) })

	// A change that only node-1 sees, and one for both.
	before := len(files(t, dir, "node-2"))
	must.Get(client.DiscoveryV1().EndpointSlices("shop").Update(t.Context(), slice("local", "node-2"), metav1.UpdateOptions{}))(t)
	until(t, "node-1 has a new file", func() bool { return len(files(t, dir, "node-1")) > applied["node-1"] })
	must.Get(client.DiscoveryV1().EndpointSlices("shop").Update(t.Context(), slice("plain", "node-1", "node-2"), metav1.UpdateOptions{}))(t)
	until(t, "node-2 has a new file", func() bool { return len(files(t, dir, "node-2")) > before })
	until(t, "node-1 has the endpoint of both changes", func() bool { return strings.Contains(listing("node-1"), other) })
	if n := len(files(t, dir, "node-2")); n != before+1 {
		t.Errorf("node-2 got %d files for one change that it sees", n-before)
	}
	got := map[string]string{"node-1": listing("node-1"), "node-2": listing("node-2")}
	stop()

	// Another process begins with everything, behind the last number.
	stop = start(t, client, dir)
	defer stop()
	for name, was := range got {
		until(t, "a full file", func() bool { return len(files(t, dir, name)) > applied[name] })
		text, err := os.ReadFile(files(t, dir, name)[applied[name]])
		if err != nil || !strings.Contains(string(text), "delete table ip proxier\n") {
			t.Errorf("%v, or the first file of a process does not replace the table", err)
		}
		of := func(s string) []string {
			return slices.Compact(slices.Sorted(slices.Values(elements.FindAllString(s, -1))))
		}
		if now := of(listing(name)); !slices.Equal(now, of(was)) || len(now) != 4 {
			t.Errorf("%s has after all changes %q, and from a full file %q", name, of(was), now)
		}
	}
}

// TestFailedWriteIsRepeatedWhole takes the folder of a node away.
func TestFailedWriteIsRepeatedWhole(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	blocked := filepath.Join(dir, "node-1")
	if err := os.WriteFile(blocked, nil, 0o644); err != nil { // a file where the folder should be
		t.Fatal(err)
	}
	client := fake.NewClientset(nodeObject("node-1"), nodeObject("node-2"), service("plain", v1.ServiceInternalTrafficPolicyCluster), slice("plain", "node-1"))
	defer start(t, client, dir)()
	until(t, "the other node has rules", func() bool { return len(files(t, dir, "node-2")) == 1 })
	must.Do(t, os.Remove(blocked))
	until(t, "the node has rules", func() bool { return len(files(t, dir, "node-1")) == 1 })
	if text, err := os.ReadFile(files(t, dir, "node-1")[0]); err != nil || !strings.Contains(string(text), "10.0.1.1") {
		t.Errorf("%v, rules:\n%s", err, text)
	}
}

// TestFirewallHasItsStages leaves stages to a firewall of the nodes.
func TestFirewallHasItsStages(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	client := fake.NewClientset(nodeObject("node-1"), service("plain", v1.ServiceInternalTrafficPolicyCluster), slice("plain", "node-1"))
	defer start(t, client, dir, nftables.Stages{NoMasquerade: true, DestinationNAT: 10})()
	until(t, "the node has rules", func() bool { return len(files(t, dir, "node-1")) == 1 })
	text, err := os.ReadFile(files(t, dir, "node-1")[0])
	if err != nil || strings.Contains(string(text), "hook postrouting") || !strings.Contains(string(text), "hook prerouting priority -92;") {
		t.Errorf("%v, rules:\n%s", err, text)
	}
}
