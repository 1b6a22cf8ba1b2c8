package agent_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/examples/agent/sockets"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// eventually waits until f returns true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(testtime.Timeout); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// leftovers returns a function that fails the test if goroutines or files are left that were not there
// when leftovers was called.
func leftovers(t *testing.T) (check func()) {
	t.Helper()
	goroutines, files := stacks(), openFiles(t)
	return func() {
		t.Helper()
		var moreStacks, moreFiles []string
		for range 200 {
			moreStacks, moreFiles = more(stacks(), goroutines), more(openFiles(t), files)
			if len(moreStacks)+len(moreFiles) == 0 {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("%d goroutines and %d files are left:\n%s\n%s", len(moreStacks), len(moreFiles), strings.Join(moreStacks, "\n\n"), strings.Join(moreFiles, "\n"))
	}
}

// stacks counts goroutines by their stack, without addresses and states. It leaves out those that copy the output of the
// control plane's programs, whose stacks change.
func stacks() map[string]int {
	all := make([]byte, 1<<24)
	out := map[string]int{}
	for g := range strings.SplitSeq(string(all[:runtime.Stack(all, true)]), "\n\n") {
		var functions []string
		for line := range strings.Lines(g) {
			if i := strings.LastIndex(line, "("); i > 0 && !strings.HasPrefix(line, "\t") && !strings.HasPrefix(line, "goroutine ") {
				functions = append(functions, line[:i])
			}
		}
		stack := strings.Join(functions, "\n")
		own := func(of string) bool { return strings.Contains(stack, of) }
		if !own("agent_test.stacks") && !own("netlab.") && !own("exec.(*Cmd).writerDescriptor") {
			out[stack]++
		}
	}
	return out
}

// openFiles counts this process's files by what they are.
func openFiles(t *testing.T) map[string]int {
	t.Helper()
	entries := must.Get(os.ReadDir("/proc/self/fd"))(t)
	out := map[string]int{}
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(to, "/proc/") {
			kind, _, _ := strings.Cut(to, ":[")
			out[kind]++
		}
	}
	return out
}

// more returns what there is more of in now than in before.
func more(now, before map[string]int) (out []string) {
	for _, k := range slices.Sorted(maps.Keys(now)) {
		if n := now[k] - before[k]; n > 0 {
			out = append(out, fmt.Sprintf("%d of\n%s", n, k))
		}
	}
	return out
}

// objects is a Source of one Service with one endpoint, on node n1, and health checks at port 32000.
func objects(endpoint string) agent.Source {
	return func(ctx context.Context, to *agent.Objects) error {
		to.SetNode(node())
		to.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
				ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: 32000,
				Ports: []v1.ServicePort{{Name: "http", Port: 80, NodePort: 30080, Protocol: v1.ProtocolTCP}},
			},
		})
		to.SetSlice(&discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080)}},
			Endpoints:   []discovery.Endpoint{{Addresses: []string{endpoint}, NodeName: ptr.To("n1"), Conditions: discovery.EndpointConditions{Ready: ptr.To(true)}}},
		})
		to.Synced()
		<-ctx.Done()
		return nil
	}
}

func node() *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}}}
}

// network is a node with a client and a pod. All networks have the same addresses but for the pod's.
type network struct{ node, client *netlab.Host }

func newNetwork(t *testing.T, pod string) network {
	t.Helper()
	lab, hosts := netlab.NewHosts(t, "node", "client", "pods")
	n, pods := network{hosts["node"], hosts["client"]}, hosts["pods"]
	n.node.Forward()
	lab.Link(n.node, "eth0", n.client, "eth0")
	n.node.Addrs("eth0", "192.0.2.1/24")
	n.client.Addrs("eth0", "192.0.2.9/24")
	n.client.Routes("", "192.0.2.1", "10.96.0.0/12")
	lab.Link(n.node, "pods", pods, "eth0")
	n.node.Addrs("pods", "10.1.0.1/24")
	pods.Addrs("eth0", pod+"/24")
	pods.Routes("", "10.1.0.1", "0.0.0.0/0")
	pods.ServeTCP(t, pod+":8080", netlab.Greet)
	return n
}

// answer connects from a host and returns who answers, "ADDRESS:PORT", or "".
func answer(from *netlab.Host, to string) string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	c, err := from.Dial(ctx, "tcp", "", to)
	if err != nil {
		return ""
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Second))
	line, _ := bufio.NewReader(c).ReadString('\n')
	server, _, _ := strings.Cut(line, " ")
	return server
}

func parse(t *testing.T, args ...string) *agent.Config {
	t.Helper()
	c := must.Get(agent.ParseArgs(args, nil))(t)
	return c
}

func logTo(t *testing.T) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }

// runAgent runs an agent until stop is called, and waits until its objects are in effect, or it has ended.
func runAgent(t *testing.T, o agent.Options) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	a := must.Get(agent.New(ctx, o))(t)
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	select {
	case <-a.Synced():
	case err := <-ended:
		t.Fatal("the agent ended: ", err)
	case <-time.After(testtime.Timeout):
		t.Fatal("no rules: the agent waits")
	}
	return func() error { cancel(); return <-ended }
}

// TestTwoAgentsServeTwoNamespaces runs two agents in this process with the same addresses and ports, in
// namespaces that the process is not in.
func TestTwoAgentsServeTwoNamespaces(t *testing.T) {
	netlab.Require(t)
	for _, mode := range []string{"nftables", "iptables", "userspace"} {
		t.Run(mode, func(t *testing.T) {
			if mode == "iptables" {
				netlab.NeedPrograms(t, "iptables-restore")
				t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "lock"))
			}
			config := parse(t, "--proxy-mode", mode, "--hostname-override", "n1", "--healthz-bind-address", "192.0.2.1:10256", "--metrics-bind-address", "127.0.0.1:10249",
				"--nodeport-addresses", "primary,127.0.0.0/8", "--sync-period", "1s", "--bind-address-hard-fail")
			pods := []string{"10.1.0.2", "10.1.0.3"}
			nets := []network{newNetwork(t, pods[0]), newNetwork(t, pods[1])}
			registry := prometheus.NewRegistry()
			check := leftovers(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error)
			var agents []*agent.Agent
			for i, n := range nets {
				a := must.Get(agent.New(ctx, agent.Options{
					Config: config, Source: objects(pods[i]), NetNS: n.node.File(), Log: logTo(t), Serve: true, Files: 1000,
					Registerer: registry, Labels: prometheus.Labels{"node": fmt.Sprint(i)},
				}))(t)
				agents = append(agents, a)
				go func() { ended <- a.Run(ctx) }()
				select {
				case <-a.Synced():
				case err := <-ended:
					t.Fatal(err)
				}
			}
			for i, n := range nets {
				want := pods[i] + ":8080"
				eventually(t, "the node port answers in namespace "+fmt.Sprint(i), func() bool { return answer(n.client, "192.0.2.1:30080") == want })
				if got := answer(n.client, "10.96.0.10:80"); got != want {
					t.Errorf("the cluster IP of node %d: %q, want %s", i, got, want)
				}
				if got := answer(n.node, "127.0.0.1:30080"); got != want {
					t.Errorf("the loopback address of node %d: %q, want %s", i, got, want)
				}
				eventually(t, "/healthz", func() bool { code, _, _ := n.client.Get("192.0.2.1:10256/healthz", time.Second); return code == 200 })
				if code, text, _ := n.node.Get("127.0.0.1:10249/proxyMode", time.Second); code != 200 || text != mode {
					t.Errorf("/proxyMode of node %d: %d %s", i, code, text)
				}
				if code, text, _ := n.client.Get("192.0.2.1:32000/", time.Second); code != 200 || !strings.Contains(text, `"localEndpoints":1`) {
					t.Errorf("the health check of node %d: %d %s", i, code, text)
				}
			}
			for i, a := range agents {
				want := netip.MustParseAddrPort(pods[i] + ":8080")
				v, found, err := a.Explain(t.Context(), ruleset.Packet{Protocol: v1.ProtocolTCP, From: netip.MustParseAddr("192.0.2.9"), To: netip.MustParseAddrPort("10.96.0.10:80"), InInterface: "eth0"})
				if err != nil || v.Action != ruleset.ActionForward || len(v.Endpoints) != 1 || v.Endpoints[0].Addr != want {
					t.Errorf("node %d: %v to %v, %v", i, v.Action, v.Endpoints, err)
				}
				if kernel := mode != "userspace"; kernel != (found != nil) || kernel && !slices.Equal(found.Endpoints, []netip.AddrPort{want}) {
					t.Errorf("the kernel of node %d: %+v", i, found)
				}
			}
			if owned, err := nftables.Owned(t.Context(), nftables.Config{}); owned || err != nil {
				t.Errorf("rules in the namespace of the process: %v, %v", owned, err)
			}
			for _, port := range []string{"127.0.0.1:10249", "127.0.0.1:30080", "127.0.0.1:32000"} {
				if c, err := net.Dial("tcp", port); err == nil {
					c.Close()
					t.Errorf("the process listens at %s in its own namespace", port)
				}
			}
			families, err := registry.Gather()
			if err != nil || len(families) == 0 || len(families[0].Metric) < 2 {
				t.Errorf("the registry has %d metrics, %v", len(families), err)
			}
			cancel()
			for range nets {
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}
			check()
			if families, err := registry.Gather(); err != nil || len(families) != 0 {
				t.Errorf("the registry has %d metrics at the end, %v", len(families), err)
			}
			if mode != "userspace" {
				for i, n := range nets {
					if got, want := answer(n.client, "10.96.0.10:80"), pods[i]+":8080"; got != want {
						t.Errorf("without the agents, node %d: %q, want %s", i, got, want)
					}
					if err := n.node.Do(func() error { return agent.Cleanup(t.Context(), config, nil, nil) }); err != nil {
						t.Error(err)
					}
					if err := agent.Cleanup(t.Context(), config, n.node.File(), nil); err != nil {
						t.Error(err)
					}
					if got := answer(n.client, "10.96.0.10:80"); got != "" {
						t.Errorf("after Cleanup, node %d: %q", i, got)
					}
				}
			}
		})
	}
}

// TestClosedAgentLeavesNothing opens agents that do not run, or cannot.
func TestClosedAgentLeavesNothing(t *testing.T) {
	h := netlab.NewHost(t)
	config := parse(t, "--hostname-override", "n1", "--bind-address-hard-fail", "--healthz-bind-address", "127.0.0.1:10256")
	check := leftovers(t)
	o := agent.Options{Config: config, Source: objects("10.1.0.2"), NetNS: h.File(), Serve: true}
	a := must.Get(agent.New(t.Context(), o))(t)
	if _, err := agent.New(t.Context(), o); !errors.Is(err, os.ErrExist) && (err == nil || !strings.Contains(err.Error(), "address already in use")) {
		t.Errorf("a second agent at the same port: %v", err)
	}
	if owned := false; h.Do(func() (err error) { owned, err = nftables.Owned(t.Context(), nftables.Config{}); return err }) != nil || owned {
		t.Error("New has written rules")
	}
	a.Close()
	o.Config = nil
	if _, err := agent.New(t.Context(), o); !errors.Is(err, agent.ErrConfig) {
		t.Errorf("without a Config: %v", err)
	}
	o.Config = parse(t)
	if _, err := agent.New(t.Context(), o); !errors.Is(err, agent.ErrConfig) {
		t.Errorf("without a name: %v", err)
	}
	check()
}

// TestPanicIsAnErrorOfRun panics in what the program gives to the agent.
func TestPanicIsAnErrorOfRun(t *testing.T) {
	h := netlab.NewHost(t)
	for name, o := range map[string]agent.Options{
		"the source": {Backend: agent.Discard, Source: func(context.Context, *agent.Objects) error { panic("ouch") }},
		"a goroutine of the source": {Backend: agent.Discard, Source: func(ctx context.Context, to *agent.Objects) error {
			go to.DeleteNode()
			<-ctx.Done()
			return nil
		}, Log: slog.New(panicking{})},
	} {
		t.Run(name, func(t *testing.T) {
			check := leftovers(t)
			o.Config, o.NetNS = parse(t, "--hostname-override", "n1"), h.File()
			a := must.Get(agent.New(t.Context(), o))(t)
			if err := a.Run(t.Context()); !errors.Is(err, agent.ErrPanic) || !strings.Contains(err.Error(), "agent_linux_test.go") && name != "a goroutine of the source" {
				t.Errorf("Run: %v", err)
			}
			check()
		})
	}
}

// TestChangedFileReloadsOrEnds changes the configuration's file.
func TestChangedFileReloadsOrEnds(t *testing.T) {
	h := netlab.NewHost(t)
	for _, reload := range []bool{true, false} {
		file := filepath.Join(t.TempDir(), "config.yaml")
		write := func(cidr string) {
			text := "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\nclusterCIDR: " + cidr + "\n"
			must.Do(t, os.WriteFile(file, []byte(text), 0o644))
		}
		write("10.0.0.0/8")
		reloaded := make(chan struct{}, 10)
		o := agent.Options{Config: parse(t, "--config", file, "--hostname-override", "n1"), Source: objects("10.1.0.2"), NetNS: h.File(), Backend: agent.Discard}
		if reload {
			o.Reload = func() { reloaded <- struct{}{} }
		}
		a := must.Get(agent.New(t.Context(), o))(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- a.Run(ctx) }()
		<-a.Synced()
		write("10.0.0.0/33") // invalid: the agent goes on
		write("10.0.0.0/9")
		if reload {
			<-reloaded
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		} else if err := <-ended; !errors.Is(err, agent.ErrConfigChanged) {
			t.Errorf("Run: %v", err)
		}
	}
}

// TestConfigsOfFlagsAndTypeAgree makes a Config in both ways.
func TestConfigsOfFlagsAndTypeAgree(t *testing.T) {
	fromFlags := parse(t, "--proxy-mode=iptables", "--cluster-cidr=10.42.0.0/16", "--v=4", "--oom-score-adj=-500", "--budget=port=7")
	k := fromFlags.Effective()
	fromType := must.Get(agent.FromKubeProxy(k, "--budget=port=7"))(t)
	if got := fromType.Effective(); got.Mode != "iptables" || got.ClusterCIDR != k.ClusterCIDR || *got.OOMScoreAdj != -500 {
		t.Errorf("%+v", got)
	}
	notes := strings.Join(fromFlags.Notes(), "\n")
	for _, want := range []string{"--v has no effect", "--oom-score-adj has no effect"} {
		if !strings.Contains(notes, want) {
			t.Errorf("no note %q in:\n%s", want, notes)
		}
	}
	for _, args := range [][]string{{"--cleanup"}, {"--init-only"}, {"--write-config-to=x"}, {"--fly"}, {"more"}, {"--cluster-cidr=x"}} {
		if _, err := agent.ParseArgs(args, nil); !errors.Is(err, agent.ErrConfig) {
			t.Errorf("%q: %v", args, err)
		}
	}
	if _, err := agent.FromKubeProxy(k, "--hostname-override=n1"); err != nil {
		t.Error(err)
	}
}

// TestAgentKnowsItsMountedPages mounts the pages where a kube-proxy would have them. The agent must not
// take them for those of a kube-proxy, whose end it would wait for in mode iptables.
func TestAgentKnowsItsMountedPages(t *testing.T) {
	netlab.NeedPrograms(t, "iptables-restore")
	h := netlab.NewHost(t)
	t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "lock"))
	ctx, cancel := context.WithCancel(t.Context())
	a := must.Get(agent.New(ctx, agent.Options{
		Config: parse(t, "--proxy-mode=iptables", "--hostname-override=n1"), Source: objects("10.1.0.2"), NetNS: h.File(), Log: logTo(t),
	}))(t)
	for addr, pages := range map[string]http.Handler{"127.0.0.1:10256": a.Healthz(), "127.0.0.1:10249": a.Metrics()} {
		l := must.Get(h.Listen("tcp", addr))(t)
		defer l.Close()
		go http.Serve(l, pages)
	}
	ended := make(chan error)
	go func() { ended <- a.Run(ctx) }()
	select {
	case <-a.Synced():
	case <-time.After(testtime.Timeout):
		t.Error("no rules: the agent waits")
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestSocketLBNeedsItsDataPlane starts an agent with --socket-lb without and with Options.SocketLB.
func TestSocketLBNeedsItsDataPlane(t *testing.T) {
	c := must.Get(agent.ParseArgs([]string{"--manifests", t.TempDir(), "--hostname-override", "n1", "--socket-lb"}, nil))(t)
	a, err := agent.New(t.Context(), agent.Options{Config: c, Backend: agent.Discard})
	if err == nil {
		a.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "Options.SocketLB") {
		t.Errorf("without a data plane: error %v", err)
	}
	opened := errors.New("opened")
	lb := sockets.LB()
	if lb.Open == nil || lb.Remove == nil {
		t.Fatalf("package sockets has %+v", lb)
	}
	lb.Open = func(context.Context, config.SocketLB, []tracker.Family, *slog.Logger) (core.SocketPlane, error) {
		return nil, opened
	}
	if _, err = agent.New(t.Context(), agent.Options{Config: c, Backend: agent.Discard, SocketLB: lb}); !errors.Is(err, opened) {
		t.Errorf("with one: error %v", err)
	}
}
