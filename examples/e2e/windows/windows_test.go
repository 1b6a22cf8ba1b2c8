//go:build linux

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/examples/internal/standin"
	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// TestNodeproxyServesOnWindows runs nodeproxy.exe in Wine against a real kube-apiserver.
func TestNodeproxyServesOnWindows(t *testing.T) {
	netlab.Require(t)
	controlplane.Need(t)
	wine := standin.Start(t)
	exe := build(t)
	s := must.Get(newSite(t.Context(), wine, t.TempDir()))(t)
	defer s.close()
	defer func() {
		if text, _ := os.ReadFile(s.log); t.Failed() {
			t.Logf("the log:\n%s", text)
		}
	}()
	var refuse atomic.Bool // makes the next change of a load balancer fail
	s.hns.Before = func(c fakehns.Call) error {
		if c == fakehns.ModifyLoadBalancer && refuse.CompareAndSwap(true, false) {
			return winkernel.Code(0x8007045b) // ERROR_SHUTDOWN_IN_PROGRESS; any would do
		}
		return nil
	}
	must.Do(t, s.createServices(t.Context(), 3))
	step := func(name string, do func() error, done func() bool, wantWrites int) {
		t.Helper()
		s.check(t, name, do, done, wantWrites)
	}
	all := func() bool { return s.loadBalancers() == 3 }
	logFile := filepath.Join(s.dir, "agent.log")
	s.flags = []string{"--log-file=" + windowsPath(logFile), "--enable-dsr", "--forward-healthcheck-vip"}
	// One load balancer and two endpoints for each, and the same for the API server's own Service.
	step("start before the service", func() error {
		s.hns.Run(false)
		defer s.hns.Run(true)
		if err := s.startProxy(exe); err != nil {
			return err
		}
		return waitForText(logFile, "waiting until the node can be served")
	}, all, 3*3+2)
	if _, got, _ := s.host.Get("127.0.0.1:10256/readyz", 30*time.Second); got != "ok" {
		t.Errorf("/readyz: %s", got)
	}
	if _, got, _ := s.host.Get("127.0.0.1:10249/proxyMode", 30*time.Second); got != "kernelspace" {
		t.Errorf("/proxyMode: %s", got)
	}
	step("change", func() error { return s.replaceEndpoint(t.Context(), 2) }, func() bool { return s.endpointReplaced(2) }, 3)
	step("change while the service is stopped", func() error {
		s.hns.Run(false)
		defer s.hns.Run(true)
		if err := s.replaceEndpoint(t.Context(), 3); err != nil {
			return err
		}
		return waitForText(logFile, "host networking service is not running")
	}, func() bool { return s.endpointReplaced(3) }, 3)
	refuse.Store(true)
	// The new endpoint stays after the failure, so no more writes take effect than without it.
	step("change that the service refuses once", func() error { return s.replaceEndpoint(t.Context(), 2) }, func() bool { return s.endpointReplaced(2) }, 3)
	line := `kubeproxy_sync_proxy_rules_winkernel_lb_update_failures_total{error="other",ip_family="IPv4",lb_type="clusterip"} 1`
	if _, got, _ := s.host.Get("127.0.0.1:10249/metrics", 30*time.Second); !strings.Contains(got, line) {
		t.Errorf("/metrics lacks %s:\n%.3000s", line, got)
	}
	step("a Service of type LoadBalancer", func() error {
		if err := s.createAnnotated(t.Context()); err != nil {
			return err
		}
		if err := waitForText(logFile, "no endpoint yet for 10.244.1.5"); err != nil {
			return err
		}
		s.hns.Plug(winkernel.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.5")}, MAC: "00-15-5d-00-00-05"})
		return nil
	}, func() bool { return s.annotated() == 4 }, 4)
	s.checkAnnotated(t)
	step("restart", func() error { s.proxy.Kill(); return s.startProxy(exe) }, all, 0)

	for _, tt := range []struct {
		args string
		want string
	}{
		{"explain --network-name=cluster --hostname-override=" + nodeName + " --bind-address=" + nodeIP + " --kubeconfig=" + windowsPath(s.control.Kubeconfig()) + " " + clusterIP(0) + ":80", "kernel: agrees"},
		{"top --network-name=cluster --once", "needs Linux"},
		{"trace --network-name=cluster 10.96.0.1:443", "needs Linux"},
		{"demo", "needs Linux"},
		{"run --proxy-mode=iptables --network-name=cluster", "must be kernelspace"},
		{"run --manifests=x", "--network-name is required"},
	} {
		if got := s.output(t, exe, strings.Fields(tt.args)...); !strings.Contains(got, tt.want) {
			t.Errorf("nodeproxy %s: %q is missing in\n%s", tt.args, tt.want, got)
		}
	}
	s.proxy.Kill()
	s.testService(t, exe)
	s.output(t, exe, "run", "--cleanup", "--network-name=cluster", "--bind-address="+nodeIP)
	endpoints, _ := s.hns.Endpoints()
	remote := func(e winkernel.Endpoint) bool { return e.Remote }
	if lbs, _ := s.hns.LoadBalancers(); len(lbs) != 0 || len(endpoints) != 2 || slices.ContainsFunc(endpoints, remote) {
		t.Errorf("after --cleanup, %v and %v are left, want the two endpoints of the network plugin", lbs, endpoints)
	}
	if m := s.hns.Mistakes(); len(m) != 0 {
		t.Errorf("mistakes: %v", m)
	}
}

// createAnnotated creates a Service of type LoadBalancer with the annotation preserve-destination,
// a source range, a pod of the node, and a pod in the node's host network.
func (s *site) createAnnotated(ctx context.Context) error {
	s.hns.Plug(winkernel.Endpoint{Name: "cbr0", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.1")}, MAC: "00-15-5d-00-00-01"})
	err := s.send(ctx, "POST", "/api/v1/namespaces/default/services", map[string]any{
		"metadata": map[string]any{"name": "annotated", "annotations": map[string]string{winkernel.PreserveDestination: "true"}},
		"spec": map[string]any{"type": "LoadBalancer", "clusterIP": clusterIP(100), "loadBalancerSourceRanges": []string{"192.0.2.0/24"},
			"ports": []any{map[string]any{"name": "http", "port": 81, "targetPort": 8080, "nodePort": 30081}}},
	})
	if err == nil {
		err = s.send(ctx, "PATCH", "/api/v1/namespaces/default/services/annotated/status", map[string]any{"status": map[string]any{
			"loadBalancer": map[string]any{"ingress": []any{map[string]any{"ip": "203.0.113.1"}}}}})
	}
	if err != nil {
		return err
	}
	return s.send(ctx, "POST", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", map[string]any{
		"metadata":    map[string]any{"name": "annotated", "labels": map[string]string{"kubernetes.io/service-name": "annotated"}},
		"addressType": "IPv4", "ports": []any{map[string]any{"name": "http", "port": 8080, "protocol": "TCP"}},
		"endpoints": []any{
			map[string]any{"addresses": []string{"10.244.1.5"}, "nodeName": nodeName, "conditions": map[string]any{"ready": true}},
			map[string]any{"addresses": []string{nodeIP}, "nodeName": nodeName, "conditions": map[string]any{"ready": true}},
		},
	})
}

// annotated returns the number of load balancers of the Service of createAnnotated.
func (s *site) annotated() int {
	lbs, _ := s.hns.LoadBalancers()
	return len(slices.DeleteFunc(lbs, func(lb winkernel.LoadBalancer) bool { return lb.Frontend.Port == 80 || lb.Frontend.Port == 443 }))
}

// checkAnnotated checks the load balancers of the Service of createAnnotated, and its Events.
func (s *site) checkAnnotated(t *testing.T) {
	t.Helper()
	want := map[string]winkernel.PortFlags{
		"TCP " + clusterIP(100) + ":81": 0,
		"TCP node port 30081 IPv4":      winkernel.LocalRoutedVIP | winkernel.VIPExternalIP,
		"TCP 203.0.113.1:81":            winkernel.VIPExternalIP | winkernel.UseMux | winkernel.PreserveDIP,
		"TCP 203.0.113.1:10256":         winkernel.UseMux | winkernel.PreserveDIP,
	}
	got := map[string]winkernel.PortFlags{}
	lbs, err := s.hns.LoadBalancers()
	for _, lb := range lbs {
		if lb.Frontend.Port != 80 && lb.Frontend.Port != 443 {
			got[lb.Frontend.String()] = lb.Flags
		}
	}
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("the annotated Service has the load balancers %v, %v; want %v", got, err, want)
	}
	var events []byte
	for range 100 {
		if events, err = s.control.Request(t.Context(), "GET", "/api/v1/namespaces/default/events", nil); err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(events, []byte("loadBalancerSourceRanges")) && bytes.Contains(events, []byte("get no connections: ["+nodeIP+"]")) {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Errorf("no Event reports that loadBalancerSourceRanges have no effect, or that the pod in the host network is left out:\n%s", events)
}

// build builds nodeproxy.exe.
func build(t *testing.T) (exe string) {
	t.Helper()
	exe = filepath.Join(t.TempDir(), "nodeproxy.exe")
	c := exec.Command("go", "build", "-o", exe, "../../nodeproxy")
	c.Env = append(os.Environ(), "GOOS=windows", "CGO_ENABLED=0")
	if text, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return exe
}

// check performs a step, and compares the writes.
func (s *site) check(t *testing.T, name string, do func() error, done func() bool, wantWrites int) {
	t.Helper()
	m := must.Get(s.step(t.Context(), name, do, done))(t)
	if m.writes != wantWrites || m.least != m.before {
		t.Errorf("%s: %d writes, %d load balancers missing; want %d and 0", name, m.writes, m.before-m.least, wantWrites)
	}
}

// TestNodeproxyTakesOverAnOverlay starts nodeproxy.exe while another program answers as kube-proxy,
// in an overlay network.
func TestNodeproxyTakesOverAnOverlay(t *testing.T) {
	netlab.Require(t)
	controlplane.Need(t)
	wine := standin.Start(t)
	exe := build(t)
	s := must.Get(newSite(t.Context(), wine, t.TempDir()))(t)
	defer s.close()
	s.hns.SetNetwork(winkernel.Network{ID: "22222222-2222-3333-4444-555555555555", Name: "cluster", Type: winkernel.Overlay,
		RemoteSubnets: []winkernel.RemoteSubnet{{Prefix: netip.MustParsePrefix("10.200.0.0/15"), Provider: netip.MustParseAddr("192.0.2.9")}}})
	must.Do(t, s.createServices(t.Context(), 3))
	l := must.Get(s.host.Listen("tcp4", "127.0.0.1:10249"))(t)
	kubeProxy := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "kernelspace") })}
	go kubeProxy.Serve(l)
	defer kubeProxy.Close()
	logFile := filepath.Join(s.dir, "agent.log")
	s.flags = []string{"--source-vip=10.244.1.2", "--metrics-bind-address=127.0.0.1:10259", "--log-file=" + windowsPath(logFile)}
	all := func() bool { return s.loadBalancers() == 3 }
	waits := func() error {
		if err := s.startProxy(exe); err != nil {
			return err
		}
		return waitForText(logFile, "waiting until it ends")
	}
	s.check(t, "start beside kube-proxy", waits, func() bool { return true }, 0)
	// A load balancer, an endpoint of the cluster IP and two of pods for each Service, two and one
	// for the API server's own, and the source VIP.
	s.check(t, "kube-proxy ends", kubeProxy.Close, all, 3*4+3+1)
	s.check(t, "restart", func() error { s.proxy.Kill(); return s.startProxy(exe) }, all, 0)
	endpoints, _ := s.hns.Endpoints()
	for _, e := range endpoints {
		vip := netip.MustParsePrefix("10.96.0.0/12").Contains(e.Addrs[0])
		if source := !e.Remote; (vip || source) && (e.MAC == "" || strings.HasPrefix(e.MAC, "02-11")) {
			t.Errorf("endpoint %v does not have the adapter's hardware address: %q", e.Addrs, e.MAC)
		}
		if pod := netip.MustParsePrefix("10.200.0.0/15").Contains(e.Addrs[0]); pod && e.Provider != netip.MustParseAddr("192.0.2.9") {
			t.Errorf("endpoint %v has the provider %v", e.Addrs, e.Provider)
		}
	}
	s.proxy.Kill()
	s.output(t, exe, "run", "--cleanup", "--network-name=cluster", "--source-vip=10.244.1.2", "--bind-address="+nodeIP)
	endpoints, _ = s.hns.Endpoints()
	if n := s.loadBalancers(); n != 0 || len(endpoints) != 1 || endpoints[0].Remote {
		t.Errorf("after --cleanup, %d load balancers and the endpoints %v are left, want the source VIP", n, endpoints)
	}
	if m := s.hns.Mistakes(); len(m) != 0 {
		t.Errorf("mistakes: %v", m)
	}
}

// waitForText waits until a file has a text.
func waitForText(file, text string) error {
	for range 600 {
		if has, _ := os.ReadFile(file); bytes.Contains(has, []byte(text)) {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	has, _ := os.ReadFile(file)
	return fmt.Errorf("%s lacks %q:\n%s", file, text, has)
}

// testService runs nodeproxy.exe as a Windows service, by Wine's service manager.
func (s *site) testService(t *testing.T, exe string) {
	t.Helper()
	// The service manager has the environment of its start, and ends with the last program that
	// is not a service.
	variable, value, _ := strings.Cut(s.server.Env(), "=")
	s.output(t, "reg.exe", "add", `HKLM\System\CurrentControlSet\Control\Session Manager\Environment`, "/v", variable, "/d", value)
	s.wine.Stop()
	cmd := s.command("cmd.exe")
	stdin := must.Get(cmd.StdinPipe())(t)
	must.Do(t, s.host.Start(cmd))
	defer func() {
		stdin.Close()
		_ = cmd.Wait()
	}()
	sc := func(args ...string) string { return s.output(t, "sc.exe", args...) }
	waitFor := func(want ...string) {
		t.Helper()
		var got string
		for range 300 {
			got = sc("query", "nodeproxy")
			if !slices.ContainsFunc(want, func(w string) bool { return !strings.Contains(got, w) }) {
				return
			}
			time.Sleep(200 * time.Millisecond)
		}
		log, _ := os.ReadFile(filepath.Join(s.dir, "service.log"))
		t.Fatalf("the service lacks %q:\n%s\nIts log:\n%s", want, got, log)
	}
	logFile := filepath.Join(s.dir, "service.log")
	s.flags[0] = "--log-file=" + windowsPath(logFile)
	create := func(flags ...string) {
		t.Helper()
		sc("create", "nodeproxy", "binPath=", windowsPath(exe)+" "+strings.Join(flags, " "))
		sc("start", "nodeproxy")
	}

	create(append(s.proxyFlags(), "--windows-service")...)
	waitFor("RUNNING")
	must.Do(t, waitForText(logFile, "synced"))
	if _, got, _ := s.host.Get("127.0.0.1:10249/proxyMode", 30*time.Second); got != "kernelspace" {
		t.Errorf("/proxyMode of the service: %s", got)
	}
	sc("stop", "nodeproxy")
	waitFor("STOPPED", "WIN32_EXIT_CODE    : 0 ")
	if err := waitForText(logFile, "stopped; the rules stay in effect"); err != nil {
		t.Error(err)
	}
	if n := s.loadBalancers(); n != 3 {
		t.Errorf("after the service stopped, there are %d load balancers, want 3", n)
	}
	sc("delete", "nodeproxy")

	create("--windows-service", "--no-such-flag")
	waitFor("STOPPED", "WIN32_EXIT_CODE    : 1066 ", "SERVICE_EXIT_CODE  : 2 ") // ERROR_SERVICE_SPECIFIC_ERROR
}

// output runs a program and returns what it prints.
func (s *site) output(t *testing.T, exe string, args ...string) string {
	t.Helper()
	c := s.command(exe, args...)
	f := must.Get(os.Create(filepath.Join(t.TempDir(), "output")))(t)
	defer f.Close()
	c.Stdout, c.Stderr = f, f
	must.Do(t, s.host.Start(c))
	_ = c.Wait() // some verbs must fail
	text := must.Get(os.ReadFile(f.Name()))(t)
	return string(text)
}
