package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// startTimeout bounds each wait while the cluster starts, on a slow machine.
const startTimeout = 5 * time.Minute

// plane is the running control plane.
type plane struct {
	settings
	ended context.CancelCauseFunc // is called with the error of a process that ends
}

// control runs as a cluster's process 1.
func control(dir string) error {
	s, err := running(dir)
	if err != nil {
		return err
	}
	// The mounts are not visible outside of the process's mount namespace.
	const script = `hostname control
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /tmp`
	if _, err := output(context.Background(), "sh", "-ec", script); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	p := &plane{settings: s, ended: cancel}
	if err := p.start(ctx); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	fmt.Println("the cluster is up until this program ends")
	<-ctx.Done()
	return context.Cause(ctx)
}

// start starts all components and waits until all nodes are ready.
func (p *plane) start(ctx context.Context) error {
	fmt.Println("starting the control plane")
	if err := p.network(); err != nil {
		return err
	}
	if err := p.users(); err != nil {
		return err
	}
	// The API server makes its own key and certificate. The key also signs the tokens of ServiceAccounts.
	key := p.state("certs", "apiserver.key")
	if err := errors.Join(
		p.daemon("etcd", "--data-dir", p.state("etcd"), "--unsafe-no-fsync",
			"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
			"--listen-peer-urls", "http://127.0.0.1:2380"),
		p.daemon("kube-apiserver", "--etcd-servers", "http://127.0.0.1:2379",
			"--bind-address", controlIP, "--advertise-address", controlIP, "--service-cluster-ip-range", serviceRange,
			"--cert-dir", p.state("certs"), "--token-auth-file", p.state("tokens.csv"), "--kubelet-preferred-address-types", "InternalIP",
			"--service-account-issuer", "https://kubernetes.default.svc."+clusterDomain,
			"--service-account-signing-key-file", key, "--service-account-key-file", key,
			"--authorization-mode", "Node,RBAC", "--allow-privileged"),
		p.wait(ctx, "", "get", "--raw", "/readyz"),
		p.daemon("kube-controller-manager", "--kubeconfig", p.state("admin.conf"), "--leader-elect=false",
			"--service-account-private-key-file", key, "--root-ca-file", p.certificate(),
			"--cluster-cidr", podRange, "--service-cluster-ip-range", serviceRange, "--allocate-node-cidrs=false"),
		p.daemon("kube-scheduler", "--kubeconfig", p.state("admin.conf"), "--leader-elect=false"),
		os.WriteFile(p.state("Corefile"), []byte(p.corefile()), 0o644),
		p.daemon("coredns", "-conf", p.state("Corefile")),
		// The API server creates namespace kube-system soon after it is ready.
		p.wait(ctx, p.objects(), "apply", "-f", "-"),
	); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", p.state("admin.conf"))
	if err != nil {
		return err
	}
	if err := serveLoadBalancers(ctx, config); err != nil {
		return err
	}
	for n := 1; n <= p.Nodes; n++ {
		fmt.Println("starting node", nodeName(n))
		if err := p.startNode(n); err != nil {
			return err
		}
	}
	return p.wait(ctx, "", "wait", "node", "--all", "--for=condition=Ready", "--timeout=10s")
}

// certificate returns the path of the API server's certificate, which is its own authority.
func (p *plane) certificate() string { return p.state("certs", "apiserver.crt") }

// users writes a token and a kubeconfig for each user of the API server.
func (p *plane) users() error {
	// As --token-auth-file has them, by the names of the tokens and kubeconfigs.
	users := map[string]string{
		"admin":      "admin,1,system:masters",
		"kube-proxy": "system:kube-proxy,2",
		// The ServiceAccount of nodeproxy's manifest, with the rights that the manifest gives it and no others.
		"nodeproxy": `system:serviceaccount:kube-system:nodeproxy,3,"system:serviceaccounts,system:serviceaccounts:kube-system"`,
	}
	for n := 1; n <= p.Nodes; n++ {
		users[nodeName(n)] = fmt.Sprintf("system:node:%s,node-%[1]s,system:nodes", nodeName(n))
	}
	var tokens []byte
	for name, user := range users {
		tokens = fmt.Appendf(tokens, "%s,%s\n", name, user)
		if err := os.WriteFile(p.state(name+".conf"), fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: cluster, cluster: {server: "https://%s:6443", certificate-authority: %s}}]
users: [{name: user, user: {token: %s}}]
contexts: [{name: context, context: {cluster: cluster, user: user}}]
current-context: context
`, controlIP, p.certificate(), name), 0o600); err != nil {
			return err
		}
	}
	return os.WriteFile(p.state("tokens.csv"), tokens, 0o600)
}

// daemon starts a program that must run as long as the cluster.
func (p *plane) daemon(name string, args ...string) error {
	return p.watch(name, exec.Command(p.bin(name), args...))
}

// watch starts a command. The end of the command ends the cluster.
func (p *plane) watch(name string, cmd *exec.Cmd) error {
	if err := p.launch(name, cmd); err != nil {
		return err
	}
	go func() {
		p.ended(fmt.Errorf("%s ended (see %s.log): %w", name, name, cmp.Or(cmd.Wait(), errors.New("exit status 0"))))
	}()
	return nil
}

// launch starts a command whose output goes to a log.
func (s settings) launch(log string, cmd *exec.Cmd) error {
	f, err := os.Create(s.log(log + ".log"))
	if err != nil {
		return err
	}
	defer f.Close()
	cmd.Stdout, cmd.Stderr, cmd.Env, cmd.Dir = f, f, s.environment(), "/"
	return cmd.Start()
}

// wait runs kubectl until it succeeds, for startTimeout at most.
func (p *plane) wait(ctx context.Context, stdin string, args ...string) error {
	for start := time.Now(); ; time.Sleep(200 * time.Millisecond) {
		cmd := exec.CommandContext(ctx, p.bin("kubectl"), args...)
		cmd.Env, cmd.Stdin = p.environment(), strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || time.Since(start) > startTimeout {
			return fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
}

// corefile returns a configuration with which CoreDNS answers as in a cluster of kubeadm,
// but without an upstream DNS server.
func (p *plane) corefile() string {
	return fmt.Sprintf(`.:53 {
    bind %s
    errors
    kubernetes %s in-addr.arpa ip6.arpa {
        kubeconfig %s
        pods insecure
        ttl 5
    }
    loadbalance
}
`, controlIP, clusterDomain, p.state("admin.conf"))
}

// objects returns the first API objects of a cluster as YAML. They include the Nodes, which
// must have the pod addresses of their CNI configurations.
func (p *plane) objects() string {
	var b strings.Builder
	for n := 1; n <= p.Nodes; n++ {
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Node
metadata:
  name: %s
  labels: {%s: %s}
spec:
  podCIDR: %s
  podCIDRs: [%q, %q]
`, nodeName(n), v1.LabelTopologyZone, zone(n), podIPs(n), podIPs(n), podIP6s(n))
	}
	// CoreDNS runs outside of pods, so its Service has no selector and its slice is written here.
	const ports = `
- {name: dns, port: 53, protocol: UDP}
- {name: dns-tcp, port: 53, protocol: TCP}`
	fmt.Fprintf(&b, `---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system, labels: {k8s-app: kube-dns}}
spec:
  clusterIP: %s
  ports:%s
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
endpoints: [{addresses: [%s], conditions: {ready: true}}]
ports:%s
`, dnsServiceIP, strings.ReplaceAll(ports, "\n", "\n  "), controlIP, ports)
	return b.String()
}

// startNode starts process 1 of a node and connects the node to the network.
func (p *plane) startNode(n int) error {
	cmd := inNamespaces("node", p.Dir, strconv.Itoa(n))
	connected, err := cmd.StdinPipe() // the node waits until it is closed
	if err != nil {
		return err
	}
	if err := p.watch(nodeName(n), cmd); err != nil {
		return err
	}
	pid := cmd.Process.Pid
	return errors.Join(p.connect(n, pid), p.writePID(nodeName(n), pid), connected.Close())
}
