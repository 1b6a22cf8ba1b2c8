package agent_test

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/connrotation"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// processState returns what belongs to the process: an agent must leave it as it is.
func processState(t *testing.T) map[string]string {
	t.Helper()
	out := map[string]string{}
	read := func(name string) string {
		text := must.Get(os.ReadFile(name))(t)
		return string(text)
	}
	out["oom_score_adj"] = read("/proc/self/oom_score_adj")
	out["limits"] = read("/proc/self/limits")
	for line := range strings.Lines(read("/proc/self/status")) {
		for _, name := range []string{"SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Umask", "Groups"} {
			if strings.HasPrefix(line, name+":") {
				out[name] = line
			}
		}
	}
	cwd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	out["cwd"], out["environment"], out["GOMAXPROCS"] = cwd, strings.Join(os.Environ(), "\n"), fmt.Sprint(runtime.GOMAXPROCS(0))
	if out["network namespace"], err = os.Readlink("/proc/self/ns/net"); err != nil {
		t.Fatal(err)
	}
	out["arguments"] = strings.Join(os.Args, " ")
	flags := func(name string, set *flag.FlagSet) {
		set.VisitAll(func(f *flag.Flag) { out[name] += f.Name + "=" + f.Value.String() + "\n" })
	}
	flags("flag.CommandLine", flag.CommandLine)
	ofKlog := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(ofKlog)
	flags("klog", ofKlog)
	out["klog's logger"] = fmt.Sprintf("%p", klog.Background().GetSink())
	out["slog"] = fmt.Sprintf("%p", slog.Default().Handler())
	for _, path := range []string{"/metrics", "/healthz", "/debug/pprof/", "/configz"} {
		_, pattern := http.DefaultServeMux.Handler(httptest.NewRequest("GET", path, nil))
		out["http.DefaultServeMux"] += path + " is " + pattern + "\n"
	}
	for name, g := range map[string]prometheus.Gatherer{"the default registry": prometheus.DefaultGatherer, "the registry of Kubernetes": legacyregistry.DefaultGatherer} {
		families := must.Get(g.Gather())(t)
		for _, f := range families {
			out[name] += f.GetName() + "\n"
		}
	}
	return out
}

// TestImportRegistersNoMetricsButThoseOfComponentBase looks for families that the agent's packages have registered.
func TestImportRegistersNoMetricsButThoseOfComponentBase(t *testing.T) {
	families := must.Get(legacyregistry.DefaultGatherer.Gather())(t)
	// The last four are component-base's own.
	known := regexp.MustCompile(`^(go_.*|process_.*|kubernetes_feature_enabled|registered_metrics_total|disabled_metrics_total|hidden_metrics_total|cardinality_enforcement_.*)$`)
	for _, f := range families {
		if !known.MatchString(f.GetName()) {
			t.Errorf("%s is registered", f.GetName())
		}
	}
}

// cluster is an API server beside a node.
type cluster struct {
	*controlplane.Server
	config *rest.Config
}

// newCluster starts an API server on a host that is linked to the node. Its clients connect from the node.
func newCluster(t *testing.T, n network) cluster {
	t.Helper()
	lab, hosts := netlab.NewHosts(t, "control")
	control := hosts["control"]
	lab.Link(n.node, "ctl", control, "eth0")
	n.node.Addrs("ctl", "10.0.0.1/24")
	control.Addrs("eth0", "10.0.0.2/24")
	s := controlplane.New(t, controlplane.Config{
		Host: control, Address: "10.0.0.2", APIServerFlags: []string{"--max-requests-inflight=2000"},
	})
	config := must.Get(clientcmd.BuildConfigFromFlags("", s.Kubeconfig()))(t)
	config.QPS = -1
	config.Dial = func(ctx context.Context, network, to string) (net.Conn, error) {
		return n.node.Dial(ctx, network, "", to)
	}
	return cluster{s, config}
}

// clientset returns a client, and a function that closes its connections. One whose last request has just
// ended is not idle yet.
func (c cluster) clientset(t *testing.T) (kubernetes.Interface, func()) {
	t.Helper()
	config := rest.CopyConfig(c.config)
	connections := connrotation.NewDialer(connrotation.DialFunc(config.Dial))
	config.Dial = connections.DialContext
	hc := must.Get(rest.HTTPClientFor(config))(t)
	cs := must.Get(kubernetes.NewForConfigAndClient(config, hc))(t)
	return cs, connections.CloseAll
}

// web creates a Service with an endpoint on node n1 and returns its cluster IP.
func web(t *testing.T, cs kubernetes.Interface, endpoint string) string {
	t.Helper()
	s, err := cs.CoreV1().Services("default").Create(t.Context(), &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1.ServiceSpec{Type: v1.ServiceTypeNodePort, Ports: []v1.ServicePort{{Name: "http", Port: 80, NodePort: 30080}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = cs.DiscoveryV1().EndpointSlices("default").Create(t.Context(), &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080)}},
		Endpoints: []discovery.Endpoint{{Addresses: []string{endpoint}, NodeName: ptr.To("n1")}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s.Spec.ClusterIP
}

// TestEmbeddedAgentLeavesTheProcessAlone embeds an agent as k3s embeds kube-proxy: with its arguments, in
// a process that has set up klog and runs other components. Another agent is hollow and shares the
// informers of the process.
func TestEmbeddedAgentLeavesTheProcessAlone(t *testing.T) {
	netlab.Require(t)
	const pod = "10.1.0.2"
	n := newNetwork(t, pod)
	c := newCluster(t, n)
	cs, closeClient := c.clientset(t)
	must.Get(cs.CoreV1().Nodes().Create(t.Context(), node(), metav1.CreateOptions{}))(t)
	// k3s prints this command line as "Running kube-proxy".
	args := strings.Fields("--cluster-cidr=10.42.0.0/16 --conntrack-max-per-core=0 --conntrack-tcp-timeout-close-wait=0s --conntrack-tcp-timeout-established=0s " +
		"--healthz-bind-address=127.0.0.1 --hostname-override=n1 --kubeconfig=/nonexistent --v=5 --feature-gates=ContextualLogging=false")
	mode := "iptables"
	if _, err := os.Stat("/usr/sbin/iptables-restore"); err != nil {
		mode = "nftables"
	}
	args = append(args, "--proxy-mode="+mode)
	t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "lock"))

	var entries []string
	klog.SetLogger(funcr.New(func(prefix, args string) { entries = append(entries, args) }, funcr.Options{}))
	t.Cleanup(klog.ClearLogger)
	closeClient()
	before, check := processState(t), leftovers(t)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	factory := informers.NewSharedInformerFactory(cs, 0)
	core, nets := factory.Core().V1(), factory.Networking().V1()
	follow := agent.Informers(core.Services().Informer(), factory.Discovery().V1().EndpointSlices().Informer(), core.Nodes().Informer(), nets.ServiceCIDRs().Informer())
	factory.Start(ctx.Done())

	ended := make(chan error)
	run := func(o agent.Options) *agent.Agent {
		t.Helper()
		a := must.Get(agent.New(ctx, o))(t)
		go func() { ended <- a.Run(ctx) }()
		return a
	}
	config := parse(t, args...)
	a := run(agent.Options{
		Config: config, Client: &kubeapi.Client{Core: cs.CoreV1().RESTClient(), Discovery: cs.DiscoveryV1().RESTClient(), Networking: cs.NetworkingV1().RESTClient()},
		NetNS: n.node.File(), Log: logTo(t), Serve: true, Component: "k3s-proxy", Version: "v1.37.0+k3s1",
	})
	hollow := run(agent.Options{Config: config, Source: follow, Backend: agent.Discard, Listen: agent.ListenNowhere})
	vip := web(t, cs, pod)
	eventually(t, "the Service answers", func() bool { return answer(n.client, vip+":80") == pod+":8080" })
	eventually(t, "the NodePort answers", func() bool { return answer(n.client, "192.0.2.1:30080") == pod+":8080" })
	for _, s := range []<-chan struct{}{a.Synced(), hollow.Synced()} {
		<-s
	}
	eventually(t, "both agents are healthy", func() bool { return a.Health().Healthy() && hollow.Health().Healthy() })
	if code, text, _ := n.node.Get("127.0.0.1:10249/metrics", time.Second); code != 200 || !strings.Contains(text, "kubeproxy_sync_proxy_rules_duration_seconds") || strings.Contains(text, "go_goroutines") {
		t.Errorf("/metrics: %d, %d bytes", code, len(text))
	}
	if code, _, _ := n.node.Get("127.0.0.1:10249/debug/pprof/", time.Second); code != 404 {
		t.Errorf("pprof is served: %d", code)
	}
	eventually(t, "the API server has an Event", func() bool {
		list, err := cs.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
		return err == nil && slices.ContainsFunc(list.Items, func(e v1.Event) bool { return e.Source.Component == "k3s-proxy" && e.Reason == "Starting" })
	})
	must.Do(t, cs.DiscoveryV1().EndpointSlices("default").Delete(t.Context(), "web-1", metav1.DeleteOptions{}))
	eventually(t, "the Service refuses", func() bool { return answer(n.client, vip+":80") == "" })

	during := processState(t)
	cancel()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	factory.Shutdown()
	closeClient()
	check()
	for when, now := range map[string]map[string]string{"while it runs": during, "at the end": processState(t)} {
		for _, k := range slices.Sorted(maps.Keys(before)) {
			if now[k] != before[k] {
				t.Errorf("%s of the process, %s:\n%s\nbefore:\n%s", k, when, now[k], before[k])
			}
		}
	}
	for _, e := range entries {
		if strings.Contains(e, "synced") || strings.Contains(e, "serving") {
			t.Errorf("the agent wrote to klog: %s", e)
		}
	}
}

// TestHollowNodesAreSmall runs 300 hollow nodes on one API server, each with a client and watches of its
// own, and prints what one takes. With PROXIER_KUBEMARK, the path of Kubernetes' kubemark, it prints the same
// of 20 hollow proxies of kubemark, one after the other. In examples/e2e/cluster:
//
//	GOWORK=off go build -o kubemark k8s.io/kubernetes/cmd/kubemark
func TestHollowNodesAreSmall(t *testing.T) {
	nodes := 20
	if os.Getenv("PROXIER_THOROUGH") != "" {
		nodes = 300
	}
	netlab.Require(t)
	n := newNetwork(t, "10.1.0.2")
	c := newCluster(t, n)
	cs, closeClient := c.clientset(t)
	web(t, cs, "10.1.0.2")
	closeClient()
	config := parse(t)
	type use struct {
		heap       uint64
		resident   uint64 // memory of the process
		goroutines int
		files      int
	}
	measure := func() use {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		files := 0
		for _, k := range openFiles(t) {
			files += k
		}
		debug.FreeOSMemory()
		return use{m.HeapAlloc + m.StackInuse, privateMemory(t, os.Getpid()), runtime.NumGoroutine(), files}
	}
	check := leftovers(t)
	before := measure()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error)
	var clients []*kubeapi.Client
	var all []*agent.Agent
	start := time.Now()
	for i := range nodes {
		client := must.Get(kubeapi.NewClient(c.config))(t)
		clients = append(clients, client)
		name := fmt.Sprintf("hollow-%d", i)
		must.Get(cs.CoreV1().Nodes().Create(t.Context(), &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}))(t)
		a := must.Get(agent.New(ctx, agent.Options{Config: config, NodeName: name, Client: client, Backend: agent.Discard, Listen: agent.ListenNowhere}))(t)
		all = append(all, a)
		go func() { ended <- a.Run(ctx) }()
	}
	for _, a := range all {
		<-a.Synced()
	}
	took := time.Since(start)
	closeClient()
	after := measure()
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "hollow nodes\tall synced after\tmemory of one\theap and stacks\tgoroutines\tfiles\t")
	fmt.Fprintf(w, "%d\t%v\t%d KiB\t%d KiB\t%.1f\t%.1f\t\n", nodes, took.Round(10*time.Millisecond), (after.resident-before.resident)/uint64(nodes)/1024,
		(after.heap-before.heap)/uint64(nodes)/1024, float64(after.goroutines-before.goroutines)/float64(nodes), float64(after.files-before.files)/float64(nodes))
	if program := os.Getenv("PROXIER_KUBEMARK"); program != "" {
		defer func() { kubemark(t, program, n.node, c.Kubeconfig()) }() // when the agents have ended
	}
	w.Flush()
	t.Logf("\n%s", table.String())
	if n := float64(after.goroutines-before.goroutines) / float64(nodes); n > 60 {
		t.Errorf("a hollow node takes %.1f goroutines", n)
	}
	cancel()
	for range nodes {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	for _, c := range clients {
		c.Close()
	}
	check()
}

// privateMemory returns the memory of a process that it shares with no other one, and its part of the rest,
// in bytes.
func privateMemory(t *testing.T, pid int) uint64 {
	t.Helper()
	text := must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid)))(t)
	for line := range strings.Lines(string(text)) {
		var kib uint64
		if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	t.Fatalf("no Pss in %s", text)
	return 0
}

// kubemark prints what a hollow proxy of kubemark takes, of 20 on the node. They count as synced when none
// has used the processor for 3 seconds.
func kubemark(t *testing.T, program string, h *netlab.Host, kubeconfig string) {
	const nodes = 20
	var all []int
	start := time.Now()
	for i := range nodes {
		cmd := exec.Command(program, "--morph=proxy", fmt.Sprintf("--name=hollow-%d", i), "--kubeconfig="+kubeconfig)
		if err := h.Start(cmd); err != nil {
			t.Error(err)
			return
		}
		all = append(all, cmd.Process.Pid)
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	}
	used := func() (ticks int) {
		for _, pid := range all {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if f := strings.Fields(string(text)); err == nil && len(f) > 14 {
				for _, s := range f[13:15] {
					n, _ := strconv.Atoi(s)
					ticks += n
				}
			}
		}
		return ticks
	}
	took := time.Duration(0)
	for last := -nodes; time.Since(start) < 2*time.Minute; time.Sleep(3 * time.Second) {
		now := used()
		if now-last <= nodes/2 { // a hundredth of a second each, at most
			break
		}
		last, took = now, time.Since(start)
	}
	var memory uint64
	files, threads := 0, 0
	for _, pid := range all {
		memory += privateMemory(t, pid)
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Error(err)
		}
		tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		files, threads = files+len(fds), threads+len(tasks)
	}
	t.Logf("%d hollow proxies of kubemark, a process each: idle after %v; of one: memory %d KiB, %.1f files, %.1f threads",
		nodes, took.Round(time.Second), memory/nodes/1024, float64(files)/nodes, float64(threads)/nodes)
}
