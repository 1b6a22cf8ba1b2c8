//go:build linux

package wholeagent

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/demo"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/program"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestCommandLinesAreAnswered runs command lines that need no agent and no rules. DIR has the Services web,
// dual, hashed and ported, and the Node n1.
func TestCommandLinesAreAnswered(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	hashed := strings.NewReplacer("web", "hashed", "10.96.0.10", "10.96.0.12", ", nodePort: 30080", "")
	ported := strings.NewReplacer("web", "ported", "10.96.0.10", "10.96.0.13", ", nodePort: 30080", "")
	annotated := func(manifest, annotation string) string {
		return strings.Replace(manifest, "metadata:\n", "metadata:\n  annotations: {go-proxier.github.io/"+annotation+"}\n", 1)
	}
	dir := t.TempDir()
	put(t, dir, "all.yaml", strings.Join([]string{
		webService, webSlice(podIPs[0]), "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.1}]}\n",
		annotated(hashed.Replace(webService), "balance: source"), annotated(hashed.Replace(webSlice(podIPs...)), "weights: '10.1.0.2=2,10.1.0.4=0'"),
		annotated(ported.Replace(webService), "balance: source-port"), ported.Replace(webSlice(podIPs...)),
		dualService() + dualSlices("n1", 2),
	}, "---\n"))
	const (
		explain = "explain --manifests DIR --hostname-override n1 "
		rules   = explain + "--kernel=false "
		hash    = rules + "--allow-annotations balance,weights --from 192.0.2.9 10.96.0.12:80 --proxy-mode "
		double  = "endpoint: 10.1.0.2:8080 on node \"\", source kept, weight 2 (66.7 %)\n"
	)
	for _, tt := range []struct {
		args string
		code int
		want string // parts of the output, separated by "…"
	}{
		{"", 2, "Usage:"},
		{"help", 0, "Usage:"},
		{"--help", 0, "Usage:"},
		{"version", 0, ", follows Kubernetes 1.37, go1."},
		{"--version", 0, "nodeproxy "},
		{"fly", 2, `no verb "fly"`},
		{"run --help", 0, "--nodeport-addresses"},
		{"run", 1, "no --manifests, --kubeconfig or --master, and not in a pod"},
		{"run --fly", 2, "unknown flag: --fly"},
		{"run --manifests /nonexistent more", 2, "1 arguments instead of 0"},
		{"--manifests /nonexistent", 1, "--manifests: manifests: stat /nonexistent: no such file"},
		{"run --manifests x --proxy-mode kernelspace", 2, `mode: Invalid value: "kernelspace"`},
		{"run --manifests x --feature-gates Fly-ing=true", 2, `unrecognized feature gate "Fly-ing"`},
		{"run --manifests x --config /nonexistent", 2, "--config: stat /nonexistent: no such file"},
		{"run --kubeconfig /nonexistent", 1, "--kubeconfig: stat /nonexistent: no such file"},
		{"run --manifests x --reset-connections-of-vanished-endpoints=-1s", 2, "is negative: -1s"},
		{"run --manifests x --proxy-mode userspace --socket-lb", 2, "--socket-lb is not supported in mode userspace"},
		{"run --init-only --manifests x --proxy-mode userspace", 0, "needs no kernel parameters"},
		{"run --proxy-mode iptables --cluster-cidr 10.0.0.0/8 --write-config-to DIR/written", 0, "wrote the configuration"},

		{"explain --manifests x", 2, "0 arguments instead of 1"},
		{"explain --manifests x 10.0.0.1", 2, `"10.0.0.1" is not ADDR:PORT`},
		{"explain --manifests x 10.0.0.1:80/icmp", 2, `protocol "icmp"`},
		{"explain --manifests DIR --from here 10.0.0.1:80", 2, `--from: "here" is neither ADDR nor ADDR:PORT`},
		{"explain --manifests DIR --from fd00::1 10.0.0.1:80", 2, "of different address families"},
		{explain + "--proxy-mode userspace " + clusterVIP, 0, "kernel: has no rules in mode userspace"},
		{rules + "--cluster-cidr 10.1.0.0/16 --from 192.0.2.9 10.96.0.10:80", 0, "service: default/web:http/TCP/IPv4, by its cluster IP\nendpoint: 10.1.0.2:8080 on node \"\", masqueraded\n"},
		{rules + "--cluster-cidr 10.1.0.0/16 --from 10.1.0.3 10.96.0.10:80/tcp", 0, "endpoint: 10.1.0.2:8080 on node \"\", source kept\n"},
		{rules + nodePort, 0, "service: default/web:http/TCP/IPv4, by its node port\n"},
		{rules + "10.96.0.10:81", 0, "reject: TCP 81 is a closed port of a cluster IP (of default/web)\n"},
		{hash + "nftables", 0, double + "…hash: 192.0.2.9 goes to 10.1.0."},
		{hash + "iptables", 0, double + "…hash: by source address, which mode iptables does not support: it chooses endpoints at random"},
		{hash + "ipvs", 0, double + "…hash: by source address, in the kernel's own Maglev table"},
		{rules + "--allow-annotations balance --from 192.0.2.9 10.96.0.13:80", 0, "hash: by source address and port…add a port to see the endpoint of the source: --from 192.0.2.9:40000\n"},
		{explain + "--from 192.0.2.9 " + clusterVIP, 1, "kernel: mode nftables has no rules in this network namespace"},
		{explain + "--nodeport-addresses localhost 127.0.0.1:30090", 0, "forward: node port of default/dual:tcp/TCP/IPv4 goes to its cluster endpoints\n…kernel: has no rule for it; the agent's process serves it\n"},
		{explain + "--nodeport-addresses localhost [::1]:30053/udp", 0, "kernel: has no rule for it; the agent's process serves it\n"},
		{rules + "--nodeport-addresses localhost 127.0.0.2:30090", 0, "nothing serves it, since the agent listens only at 127.0.0.1\n"},
		{rules + "--nodeport-addresses localhost --feature-gates KubeProxyNFTablesLocalhostNodePorts=false 127.0.0.1:30090", 0, "nothing serves it, since the feature gate"},
		{rules + "--nodeport-addresses all 127.0.0.1:30090", 0, "pass: 127.0.0.1 is the node's own address"},

		{"trace --must=false", 2, "0 arguments instead of 1"},
		{"trace --must=false --by guess 10.0.0.1:80", 2, `--by "guess" is neither nftrace nor conntrack`},
		{"trace --must=false --for 0s 10.0.0.1:80", 2, "must be positive"},
		{"trace --must=false --from fd00::1 10.0.0.1:80", 2, "of different address families"},
		{"trace --manifests /nonexistent 10.0.0.1:80", 1, "/nonexistent: no such file"},
		{"trace --must=false --proxy-mode userspace " + clusterVIP, 1, "no rules and counters in the kernel"},

		{"top --once", 1, "mode nftables has no rules in this network namespace"},
		{"top --once --proxy-mode userspace", 1, "no rules and counters in the kernel"},
		{"top --sort size", 2, `--sort "size" is not`},
		{"top -o json", 2, "--output json needs --once"},
		{"top -o xml --once", 2, `--output "xml" is neither`},
		{"top --interval 1ms", 2, "--interval 1ms is less than 100ms"},

		{"demo --fly", 2, "unknown flag"},
		{"demo --help", 0, "--hold"},
	} {
		var both strings.Builder
		p := &cli.Program{Out: &both, Diag: &both}
		code := program.Dispatch(t.Context(), p, strings.Fields(strings.ReplaceAll(tt.args, "DIR", dir)))
		rest, ok := both.String(), true
		for part := range strings.SplitSeq(tt.want, "…") {
			var found bool
			_, rest, found = strings.Cut(rest, part)
			ok = ok && found
		}
		if code != tt.code || !ok {
			t.Errorf("nodeproxy %s: exit status %d, want %d; output:\n%s\nwant %q in it", tt.args, code, tt.code, both.String(), tt.want)
		}
	}
	if text := string(must.Get(os.ReadFile(filepath.Join(dir, "written")))(t)); !strings.Contains(text, "\nmode: iptables\n") || !strings.Contains(text, "\nclusterCIDR: 10.0.0.0/8\n") {
		t.Errorf("--write-config-to:\n%s", text)
	}
}

// TestVerbsNeedCapNetAdmin runs top and trace as an ordinary user, and top without a terminal.
func TestVerbsNeedCapNetAdmin(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.serveWeb(t, nil)
	user := []string{otherUserEnv + "=1"}
	for _, tt := range []struct {
		env        []string
		args, want string
	}{
		{user, "top --once", "without CAP_NET_ADMIN in this network namespace"},
		{user, "trace --must=false --by nftrace " + clusterVIP, "needs CAP_NET_ADMIN in this network namespace: run it as root"},
		{user, "trace --must=false --by conntrack " + clusterVIP, "needs CAP_NET_ADMIN in this network namespace: run it as root"},
		{nil, "top", "are not a terminal; --once works without one"},
	} {
		p := startWith(t, s.Node, tt.env, strings.Fields(tt.args)...)
		if code, _ := p.exit(t); code != 1 || !strings.Contains(p.log(), tt.want) {
			t.Errorf("%s: exit status %d, log:\n%s", tt.args, code, p.log())
		}
	}
}

// demoCommand returns the demo as a user runs it, outside of the tests' namespaces.
func demoCommand(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", append([]string{"demo"}, args...)...)
	cmd.Env = slices.DeleteFunc(append(os.Environ(), programEnv+"=1"), func(v string) bool { return strings.HasPrefix(v, "PROXIER_NETLAB") })
	return cmd
}

// TestInterruptedDemoReturns130 interrupts the demo in the middle. Step demo of .ci/run runs all of it.
func TestInterruptedDemoReturns130(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	cmd := demoCommand()
	var out process
	cmd.Stdout, cmd.Stderr = &out, &out
	must.Do(t, cmd.Start())
	defer cmd.Process.Kill()
	eventually(t, "the demo has begun", func() bool { return strings.Contains(out.log(), "ok ") })
	cmd.Process.Signal(os.Interrupt)
	cmd.Wait()
	if code, text := cmd.ProcessState.ExitCode(), out.log(); code != demo.ExitStopped || !strings.HasSuffix(text, "\nStopped.\n") || strings.Contains(text, "FAILED") {
		t.Errorf("exit status %d, output:\n%s", code, text)
	}
}

// TestDemoWithoutRightsReturns3 runs the demo where namespaces cannot be created, and --socket-lb where the
// kernel does not load programs.
func TestDemoWithoutRightsReturns3(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	// The limits can be set in a new user namespace.
	cmd := netlab.Command(t, "sh", "-c", `echo 0 > /proc/sys/user/max_user_namespaces && echo 0 > /proc/sys/user/max_net_namespaces && exec "$0" demo`, testBinary(t))
	cmd.Env = []string{programEnv + "=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: []syscall.SysProcIDMap{{Size: 1}}, GidMappings: []syscall.SysProcIDMap{{Size: 1}},
	}
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != demo.ExitNoSpaces || !strings.Contains(string(out), "needs the right to create user and network namespaces") {
		t.Errorf("exit status %d, output:\n%s", code, out)
	}

	dir, closeDir, err := socketlb.TemporaryDir()
	if err == nil {
		err = errors.Join(socketlb.Probe(t.Context(), socketlb.Config{Dir: dir}), closeDir())
	}
	if err == nil {
		t.Skip("programs can be loaded here")
	}
	var diag strings.Builder
	status := program.Dispatch(t.Context(), &cli.Program{Out: &diag, Diag: &diag}, []string{"demo", "--socket-lb"})
	if status != demo.ExitNoSpaces || !strings.Contains(diag.String(), "CAP_BPF") || !strings.Contains(diag.String(), "needs root") {
		t.Errorf("status %d, output:\n%s", status, diag.String())
	}
}

func testBinary(t *testing.T) string {
	t.Helper()
	return must.Get(os.Executable())(t)
}
