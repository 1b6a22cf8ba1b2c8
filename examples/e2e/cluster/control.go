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

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// startTimeout bounds each wait while the cluster starts, on a slow machine.
const startTimeout = 5 * time.Minute

// plane is the state of role control, the running control plane.
type plane struct {
	settings
	ended chan error // receives the error of the first process that ends
}

// control is the role of a cluster's process 1.
func control() error {
	s, err := parseSettings(os.Args[1])
	if err != nil {
		return err
	}
	p := &plane{settings: s, ended: make(chan error, 1)}
	if err := p.mounts(); err != nil {
		return err
	}
	p.settings = s.inside()
	ctx, cancel := context.WithCancelCause(context.Background())
	go func() { cancel(<-p.ended) }()
	if err := p.start(ctx); err != nil {
		return cmp.Or(context.Cause(ctx), err)
	}
	fmt.Println("the cluster is up until this program ends")
	<-ctx.Done()
	return context.Cause(ctx)
}

// mounts mounts a /proc of the process's PID namespace, the cache folder at cacheInside, and
// an empty /tmp. The mounts are not visible outside of its mount namespace.
func (p *plane) mounts() error {
	if err := unix.Sethostname([]byte("control")); err != nil {
		return os.NewSyscallError("sethostname", err)
	}
	return mountAll([]mount{
		{target: "/", flags: unix.MS_REC | unix.MS_PRIVATE},
		{source: p.Dir, target: cacheInside, flags: unix.MS_BIND},
		{source: "proc", target: "/proc", fstype: "proc"},
		{source: "tmpfs", target: "/tmp", fstype: "tmpfs"},
	})
}

// mount is one call of mount(2).
type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

// mountAll makes mounts in order. It stops at the first error: nothing may be mounted if
// mounts could not be made private.
func mountAll(mounts []mount) error {
	for _, m := range mounts {
		if err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data); err != nil {
			return fmt.Errorf("cannot mount %s at %s: %w", m.source, m.target, err)
		}
	}
	return nil
}

// start starts all components and waits until all nodes are ready.
func (p *plane) start(ctx context.Context) error {
	fmt.Println("starting the control plane")
	if err := p.network(); err != nil {
		return err
	}
	if err := p.keys(); err != nil {
		return err
	}
	if err := p.daemon("etcd", p.bin("etcd"), "--data-dir", p.state("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380"); err != nil {
		return err
	}
	if err := p.daemon("kube-apiserver", p.bin("kube-apiserver"), "--etcd-servers", "http://127.0.0.1:2379",
		"--bind-address", controlIP, "--advertise-address", controlIP, "--service-cluster-ip-range", serviceRange,
		"--tls-cert-file", p.state("apiserver.crt"), "--tls-private-key-file", p.state("apiserver.key"),
		"--client-ca-file", p.state("ca.crt"), "--kubelet-client-certificate", p.state("admin.crt"), "--kubelet-client-key", p.state("admin.key"),
		"--kubelet-preferred-address-types", "InternalIP",
		"--service-account-issuer", "https://kubernetes.default.svc."+clusterDomain,
		"--service-account-signing-key-file", p.state("ca.key"), "--service-account-key-file", p.state("ca.key"),
		"--authorization-mode", "Node,RBAC", "--allow-privileged"); err != nil {
		return err
	}
	if err := p.wait(ctx, "", "get", "--raw", "/readyz"); err != nil {
		return err
	}
	if err := p.daemon("kube-controller-manager", p.bin("kube-controller-manager"), append(p.authentication(),
		"--leader-elect=false", "--service-account-private-key-file", p.state("ca.key"), "--root-ca-file", p.state("ca.crt"),
		"--cluster-cidr", podRange, "--service-cluster-ip-range", serviceRange, "--allocate-node-cidrs=false")...); err != nil {
		return err
	}
	if err := p.daemon("kube-scheduler", p.bin("kube-scheduler"), append(p.authentication(), "--leader-elect=false")...); err != nil {
		return err
	}
	if err := os.WriteFile(p.state("Corefile"), []byte(p.corefile()), 0o644); err != nil {
		return err
	}
	if err := p.daemon("coredns", p.bin("coredns"), "-conf", p.state("Corefile")); err != nil {
		return err
	}
	// The API server creates namespace kube-system soon after it is ready.
	if err := p.wait(ctx, p.objects(), "apply", "-f", "-"); err != nil {
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

// daemon starts a program that must run as long as the cluster.
func (p *plane) daemon(name, path string, args ...string) error {
	log, err := os.Create(p.log(name + ".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := &exec.Cmd{Path: path, Args: append([]string{name}, args...), Stdout: log, Stderr: log, Env: p.environment(), Dir: "/"}
	return p.watch(name, cmd)
}

// watch starts a command. The end of the command ends the cluster.
func (p *plane) watch(name string, cmd *exec.Cmd) error {
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("cannot start %s: %w", name, err)
	}
	go func() {
		err := cmd.Wait()
		if err == nil {
			err = errors.New("exit status 0")
		}
		select {
		case p.ended <- fmt.Errorf("%s ended (see %s.log): %w", name, name, err):
		default:
		}
	}()
	return nil
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

// authentication returns the flags that make a component of the control plane an
// administrator.
func (p *plane) authentication() []string {
	c := p.state("admin.conf")
	return []string{"--kubeconfig", c, "--authentication-kubeconfig", c, "--authorization-kubeconfig", c}
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

// startNode starts a process in role node and connects the node to the network.
func (p *plane) startNode(n int) error {
	name := nodeName(n)
	if err := os.MkdirAll(p.state(name), 0o755); err != nil {
		return err
	}
	log, err := os.Create(p.log(name + ".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := inRole("node", p.json(), strconv.Itoa(n))
	cmd.Stdout, cmd.Stderr, cmd.Env = log, log, p.environment()
	connected, err := cmd.StdinPipe() // the node waits until it is closed
	if err != nil {
		return err
	}
	if err := p.watch(name, cmd); err != nil {
		return err
	}
	pid := cmd.Process.Pid
	if err := p.connect(n, pid); err != nil {
		return err
	}
	if err := os.WriteFile(p.state(name, "pid"), []byte(strconv.Itoa(pid)), 0o644); err != nil {
		return err
	}
	return connected.Close()
}
