//go:build linux

package wholeagent

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// pauseTime is the time between two connections, or two questions, of a host.
const pauseTime = 10 * time.Millisecond

// member is a node of a rehearsal, with a pod.
type member struct {
	name, addr, podIP string
	node, pod         *netlab.Host
	streams           map[string]*lab.Stream
	// running holds the processes of each DaemonSet.
	running map[string]*process
}

// rehearsal is a cluster of three nodes with a real API server. The test is its kubelet and its
// controller of DaemonSets.
type rehearsal struct {
	t       *testing.T
	c       *cluster
	members []*member
	client  *netlab.Host
	locks   string // the folder for the nodes' locks of iptables
}

func newRehearsal(t *testing.T) *rehearsal {
	t.Helper()
	network, _ := netlab.NewHosts(t)
	r := &rehearsal{t: t, locks: t.TempDir()}
	lan := network.Host("lan")
	join := func(h *netlab.Host, addr string) {
		network.Link(lan, h.Name, h, "eth0")
		h.Addrs("eth0", addr+"/24")
	}
	var ports []string
	for i := range 3 {
		m := &member{
			name: fmt.Sprintf("n%d", i+1), addr: fmt.Sprintf("192.0.2.1%d", i+1), podIP: fmt.Sprintf("10.1.%d.2", i+1), running: map[string]*process{},
		}
		m.node, m.pod = network.Host(m.name), network.Host("pod"+m.name)
		m.node.Forward()
		network.Link(m.node, "pod", m.pod, "eth0")
		m.node.Addrs("pod", fmt.Sprintf("10.1.%d.1/24", i+1))
		m.pod.Addrs("eth0", m.podIP+"/24")
		m.pod.Routes("", fmt.Sprintf("10.1.%d.1", i+1), "0.0.0.0/0")
		join(m.node, m.addr)
		m.node.Routes("", "192.0.2.9", "0.0.0.0/0")
		ports = append(ports, m.name)
		lab.Serve(m.podIP, m.pod, m.podIP)
		r.members = append(r.members, m)
	}
	r.client = network.Host("client")
	join(r.client, "192.0.2.9")
	for i := range stickyClients {
		r.client.Addrs("eth0", fmt.Sprintf("192.0.2.%d/24", 100+i))
	}
	control := network.Host("control")
	join(control, "192.0.2.8")
	network.Do(func() error { return lan.AddBridge("br", append(ports, "client", "control")...) })
	for i, m := range r.members {
		for j, other := range r.members {
			if i != j {
				m.node.Routes("", other.addr, fmt.Sprintf("10.1.%d.0/24", j+1))
			}
		}
	}
	r.c = newCluster(t, control, "192.0.2.8")
	for i, m := range r.members {
		r.c.do("POST", "/api/v1/nodes", fmt.Sprintf(`{apiVersion: v1, kind: Node, metadata: {name: %s}, spec: {podCIDR: 10.1.%d.0/24}}`, m.name, i+1), nil)
		r.c.do("PATCH", "/api/v1/nodes/"+m.name+"/status", fmt.Sprintf(`status: {addresses: [{type: InternalIP, address: %s}]}`, m.addr), nil)
	}
	r.c.do("POST", "/api/v1/namespaces/default/services", `{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.10, type: NodePort, ports: [{name: http, port: 80, nodePort: 30080}]}}`, nil)
	r.c.do("POST", "/api/v1/namespaces/default/services", `{apiVersion: v1, kind: Service, metadata: {name: dns}, spec: {clusterIP: 10.96.0.53, ports: [{name: dns, port: 53, protocol: UDP}]}}`, nil)
	r.c.do("POST", "/api/v1/namespaces/default/services", `{apiVersion: v1, kind: Service, metadata: {name: sticky}, spec: {clusterIP: 10.96.0.20, sessionAffinity: ClientIP, type: NodePort, ports: [{name: http, port: 80, nodePort: 30020}]}}`, nil)
	all := r.endpoints(0, 1, 2)
	r.c.do("POST", slicesPath, all, nil)
	r.c.do("POST", slicesPath, strings.ReplaceAll(all, "web", "sticky"), nil)
	r.c.do("POST", slicesPath, strings.NewReplacer("web", "dns", "name: http, port: 8080", "name: dns, port: 5353, protocol: UDP").Replace(all), nil)
	return r
}

// endpoints returns the EndpointSlice of the Service web.
func (r *rehearsal) endpoints(members ...int) string {
	var list []string
	for _, i := range members {
		list = append(list, r.members[i].podIP+" "+r.members[i].name)
	}
	return endpoints("web", list...)
}

// change replaces the endpoints of the Service web. Those of the Service dns stay: an answer that is
// under way when a stale UDP flow is deleted is lost.
func (r *rehearsal) change(members ...int) {
	r.t.Helper()
	r.c.do("PUT", slicesPath+"/web-1", r.endpoints(members...), nil)
}

// served waits until exactly the members' pods answer on each node.
func (r *rehearsal) served(what string, members ...int) {
	r.t.Helper()
	var want []string
	for _, i := range members {
		want = append(want, r.members[i].podIP)
	}
	for _, m := range r.members {
		eventually(r.t, what+" on "+m.name, func() bool {
			return lab.Visits(m.pod, "", clusterVIP, 30).Answered(want...) && lab.Visits(r.client, "", lab.Port(m.addr, "30080"), 30).Answered(want...)
		})
	}
}

// begin starts traffic on each node: new connections to the NodePort and from the pod, questions over a connection of
// each kind that stays open, and over UDP from the pod and from the node.
func (r *rehearsal) begin() {
	r.t.Helper()
	for _, m := range r.members {
		nodePort := lab.Port(m.addr, "30080")
		start := func(visit func(*netlab.Host, string, string) (string, string, error), a *netlab.Host, toA string, b *netlab.Host, toB string) *lab.Stream {
			return lab.StartStream(&lab.Stream{Visit: visit, Pause: pauseTime}, a, toA, b, toB)
		}
		m.streams = map[string]*lab.Stream{
			"new connections":  start(lab.Visit, r.client, nodePort, m.pod, clusterVIP),
			"open connections": start(r.asks("tcp", map[*netlab.Host]string{r.client: nodePort, m.pod: clusterVIP}), r.client, nodePort, m.pod, clusterVIP),
			"UDP":              start(r.asks("udp", map[*netlab.Host]string{m.pod: clusterDNS, m.node: clusterDNS}), m.pod, clusterDNS, m.node, clusterDNS),
		}
	}
}

const clusterDNS = "10.96.0.53:53"

// asks returns a function that asks over the connection of a host to an address, all of which it opens.
func (r *rehearsal) asks(network string, to map[*netlab.Host]string) func(h *netlab.Host, _, _ string) (string, string, error) {
	r.t.Helper()
	open := map[*netlab.Host]*lab.Talk{}
	for h, at := range to {
		c := must.Get(lab.Dial(h, network, "", at, testtime.Timeout))(r.t)
		r.t.Cleanup(func() { c.Close() })
		if network == "tcp" {
			_, _, err := c.Hear()
			must.Do(r.t, err)
		}
		open[h] = c
	}
	return func(h *netlab.Host, _, _ string) (string, string, error) { return open[h].Ask() }
}

// stickyClients is the number of clients of the Service sticky.
const stickyClients = 8

// choices returns the endpoint of the Service sticky that each client of a node gets.
func (r *rehearsal) choices() map[string]string {
	r.t.Helper()
	out := map[string]string{}
	for _, m := range r.members {
		for i := range stickyClients {
			from := fmt.Sprintf("192.0.2.%d", 100+i)
			name, _, err := lab.Visit(r.client, from, lab.Port(m.addr, "30020"))
			if err != nil {
				r.t.Error(err)
			}
			out[from+" by "+m.name] = name
		}
	}
	return out
}

// held checks that nothing was lost since the last call.
func (r *rehearsal) held(when string) {
	r.t.Helper()
	for _, m := range r.members {
		for name, stream := range m.streams {
			held(r.t, stream, when+", "+m.name+", "+name)
		}
	}
}

// end ends the traffic and prints its amount.
func (r *rehearsal) end() {
	r.t.Helper()
	r.held("at the end")
	answers := 0
	for _, m := range r.members {
		for _, stream := range m.streams {
			for _, n := range stream.Stop().Answers {
				answers += n
			}
		}
	}
	r.t.Logf("%d connections and questions", answers)
}

// mounted writes the ConfigMaps that a container mounts, and returns its arguments with the
// paths of the files.
func (r *rehearsal) mounted(m *member, spec *v1.PodSpec, c *v1.Container) []string {
	r.t.Helper()
	args := slices.Concat(c.Command, c.Args)
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "$(NODE_NAME)", m.name)
	}
	for _, v := range spec.Volumes {
		if v.ConfigMap == nil {
			continue
		}
		var data v1.ConfigMap
		r.c.do("GET", kinds["ConfigMap"]+"/"+v.ConfigMap.Name, "", &data)
		for _, at := range c.VolumeMounts {
			if at.Name != v.Name {
				continue
			}
			dir := r.t.TempDir()
			for name, text := range data.Data {
				put(r.t, dir, name, strings.ReplaceAll(text, at.MountPath+"/", dir+"/"))
			}
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], at.MountPath+"/", dir+"/")
			}
		}
	}
	return args
}

// inPod runs a container's command with the environment of a pod: its variables, and the token of
// the ServiceAccount.
func (r *rehearsal) inPod(m *member, spec *v1.PodSpec, c *v1.Container) *process {
	r.t.Helper()
	args := r.mounted(m, spec, c)
	env := []string{"XTABLES_LOCKFILE=" + filepath.Join(r.locks, m.name)}
	program := testBinary(r.t)
	switch {
	case strings.Contains(c.Image, "registry.k8s.io/kube-proxy"):
		program, args = os.Getenv("PROXIER_KUBE_PROXY"), args[1:]
	case len(c.Command) != 0: // kubeadm's DaemonSet with another image
		env = append(env, asKubeProxyEnv+"=1")
		args = args[1:]
	}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			env = append(env, e.Name+"="+e.Value)
		}
	}
	const account = "/run/secrets/kubernetes.io/serviceaccount/"
	script := "mount -t tmpfs run /run && mkdir -p " + account + ` && cp "$0" ` + account + "ca.crt && echo -n " + controlplane.UserToken + " >" + account + `token && exec "$@"`
	return startProgram(r.t, m.node, "/usr/bin/unshare", env, append([]string{"-m", "sh", "-c", script, r.c.Certificate(), program}, args...)...)
}

// start starts a pod of the DaemonSet on each node. Its init containers end before.
func (r *rehearsal) start(ds *apps.DaemonSet) {
	r.t.Helper()
	for _, m := range r.members {
		r.startOn(m, ds)
	}
}

func (r *rehearsal) startOn(m *member, ds *apps.DaemonSet) {
	r.t.Helper()
	spec := &ds.Spec.Template.Spec
	for i := range spec.InitContainers {
		p := r.inPod(m, spec, &spec.InitContainers[i])
		if code, _ := p.exit(r.t); code != 0 {
			r.t.Fatalf("%s on %s: exit status %d, log:\n%s", spec.InitContainers[i].Name, m.name, code, p.log())
		}
	}
	p := r.inPod(m, spec, &spec.Containers[0])
	m.running[ds.Name] = p
	r.t.Cleanup(func() {
		if r.t.Failed() {
			r.t.Logf("log of %s on %s:\n%s", ds.Name, m.name, p.log())
		}
	})
}

// ready waits for the readiness probe on each node.
func (r *rehearsal) ready(ds *apps.DaemonSet) {
	r.t.Helper()
	probe := ds.Spec.Template.Spec.Containers[0].ReadinessProbe.HTTPGet
	for _, m := range r.members {
		eventually(r.t, ds.Name+" is ready on "+m.name, func() bool {
			code, _, _ := get(r.t, m.node, fmt.Sprintf("http://%s:%s%s", probe.Host, probe.Port.String(), probe.Path))
			return code == http.StatusOK
		})
	}
}

// remove deletes a DaemonSet, and ends its pods.
func (r *rehearsal) remove(name string) {
	r.t.Helper()
	r.c.do("DELETE", kinds["DaemonSet"]+"/"+name, "", nil)
	for _, m := range r.members {
		r.stopOn(m, name)
	}
}

func (r *rehearsal) stopOn(m *member, name string) {
	r.t.Helper()
	p := m.running[name]
	delete(m.running, name)
	p.Process.Signal(syscall.SIGTERM)
	p.exit(r.t)
}

// kubeProxyManifests returns what kubeadm makes, with a mode.
func (r *rehearsal) kubeProxyManifests(mode string) string {
	r.t.Helper()
	text := must.Get(os.ReadFile("../../../internal/node/config/testdata/kubeadm.yaml"))(r.t)
	// Nodes that are containers cannot set the maximum of connections.
	config := strings.NewReplacer("10.244.0.0/16,fd00:10:244::/56", "10.1.0.0/16", "maxPerCore: null", "maxPerCore: 0", "min: null", "min: 0", `mode: ""`, "mode: "+mode).Replace(string(text))
	kubeconfig := must.Get(os.ReadFile(r.c.Kubeconfig()))(r.t)
	data := must.Get(json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": "kube-proxy", "namespace": "kube-system"},
		"data": map[string]string{"config.conf": config, "kubeconfig.conf": string(kubeconfig)},
	}))(r.t)
	return string(data) + "\n---\n" + string(must.Get(os.ReadFile("testdata/kube-proxy.yaml"))(r.t))
}

// kubeProxyServes waits until kube-proxy has written its rules on a node: its /healthz answers
// before that.
func (r *rehearsal) kubeProxyServes(m *member, mode string) {
	r.t.Helper()
	eventually(r.t, "kube-proxy has written its rules on "+m.name, func() bool {
		if mode == "nftables" {
			text, err := m.node.Run(r.t, "nft", "list", "map", "ip", "kube-proxy", "service-ips")
			return err == nil && strings.Contains(text, "10.96.0.10 . tcp . 80 :")
		}
		text, err := m.node.Run(r.t, "iptables-save")
		return err == nil && strings.Contains(text, "-A KUBE-SERVICES -d 10.96.0.10/32 ") && !strings.Contains(text, "-j KUBE-CLUSTER-IPS")
	})
}

// render runs the command of .ci/deploy.
func render(t *testing.T, what, arg string) string {
	t.Helper()
	cmd := exec.Command("go", "run", "./render", what, arg)
	cmd.Dir = "../../../../.ci/deploy"
	cmd.Env = append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		errors.As(err, &exit)
		t.Fatalf("%v\n%s", err, exit.Stderr)
	}
	return string(out)
}

// TestRehearsal moves three nodes from kube-proxy to nodeproxy and back, by the commands of
// deploy/base/daemonset.yaml, deploy/overlays/kubeadm and deploy/chart, while connections are
// opened, stay open and ask over UDP. It changes the mode of the chart and rolls that back.
func TestRehearsal(t *testing.T) {
	t.Parallel()
	testtime.NeedComplete(t)
	takeOverTools(t)
	netlab.NeedPrograms(t, "unshare")
	netlab.Need(t, os.Getenv("PROXIER_KUBE_PROXY") != "", "PROXIER_KUBE_PROXY: a kube-proxy")
	overlay := func(t *testing.T, _ string) string {
		return render(t, "kustomize", "../../examples/nodeproxy/deploy/overlays/kubeadm")
	}
	chart := func(t *testing.T, mode string) string {
		return render(t, "chart", "{apiServer: {host: 192.0.2.8}, mode: "+mode+", config: {clusterCIDR: 10.1.0.0/16, conntrack: {maxPerCore: 0}}}")
	}
	base := func(t *testing.T, mode string) string {
		var out []string
		for _, file := range []string{"rbac.yaml", "daemonset.yaml"} {
			text := must.Get(os.ReadFile("../../deploy/base/" + file))(t)
			out = append(out, strings.Replace(string(text), "api.cluster.example", "192.0.2.8", 1))
		}
		text := must.Get(os.ReadFile("../../deploy/base/config.yaml"))(t)
		config := strings.NewReplacer("10.244.0.0/16", "10.1.0.0/16", "mode: nftables", "mode: "+mode).Replace(string(text)) + "conntrack: {maxPerCore: 0}\n"
		data := must.Get(json.Marshal(config))(t)
		return strings.Join(append(out, `{apiVersion: v1, kind: ConfigMap, metadata: {name: nodeproxy, namespace: kube-system}, data: {config.yaml: `+string(data)+`}}`), "\n---\n")
	}
	for _, tt := range []struct {
		name, from string   // kube-proxy's mode; kubeadm's file names none by default
		to         []string // the modes, one after the other
		install    func(t *testing.T, mode string) string
		long       bool
	}{
		{"base", "iptables", []string{"nftables"}, base, false},
		{"kubeadm overlay", "", []string{"nftables"}, overlay, true},
		{"kubeadm overlay", "iptables", []string{"iptables"}, overlay, true},
		{"kubeadm overlay", "nftables", []string{"nftables"}, overlay, true},
		{"chart", "nftables", []string{"nftables"}, chart, true},
		{"chart", "iptables", []string{"iptables"}, chart, true},
		{"chart", "iptables", []string{"nftables", "iptables", "nftables"}, chart, true}, // rolled back
		{"chart", "nftables", []string{"iptables", "nftables"}, chart, true},
	} {
		t.Run(tt.name+"/"+cmp.Or(tt.from, "default")+" to "+strings.Join(tt.to, " to "), func(t *testing.T) {
			if tt.long {
				testtime.NeedThorough(t)
			} else {
				t.Parallel()
			}
			r := newRehearsal(t)
			r.c.apply(tt.install(t, tt.to[0])) // for the rights that kube-proxy of the test uses, too
			r.c.do("DELETE", kinds["DaemonSet"]+"/nodeproxy", "", nil)
			kubeProxy := r.c.apply(r.kubeProxyManifests(tt.from))
			r.start(kubeProxy)
			r.served("kube-proxy serves", 0, 1, 2)
			r.begin()
			chosen := r.choices()
			r.held("with kube-proxy")

			// There.
			ds := r.c.apply(tt.install(t, tt.to[0]))
			r.start(ds)
			for _, m := range r.members {
				// The log is JSON, or kubeadm's text with the line of a sync at standard output.
				eventually(t, "nodeproxy writes its rules on "+m.name+", or waits", func() bool {
					p := m.running["nodeproxy"]
					return len(p.lines) != 0 || strings.Contains(p.log(), `"msg":"synced"`) || strings.Contains(p.log(), "kube-proxy runs and writes the same rules")
				})
			}
			// As "helm install --wait" waits, unless both write the same rules.
			if to := tt.to[0]; to == "nftables" || to != cmp.Or(tt.from, "iptables") {
				r.ready(ds)
			}
			r.held("when both run")
			r.change(0, 1)
			r.served("both serve", 0, 1)
			r.held("after a change while both run")
			r.remove("kube-proxy")
			r.ready(ds)
			r.held("when kube-proxy is deleted")
			r.change(1, 2)
			r.served("nodeproxy serves", 1, 2)
			for _, m := range r.members {
				eventually(t, "kube-proxy's rules are gone on "+m.name, func() bool {
					got := rules(t, m.node)
					return !got["kube-proxy nftables"] && (tt.to[0] == "iptables" || !got["iptables"])
				})
			}
			r.held("with nodeproxy")
			if now := r.choices(); !maps.Equal(chosen, now) {
				t.Errorf("clients with affinity get %v, before %v", now, chosen)
			}

			// Another mode: a rollout, node by node.
			for _, mode := range tt.to[1:] {
				ds = r.c.apply(tt.install(t, mode))
				for _, m := range r.members {
					r.stopOn(m, "nodeproxy")
					r.startOn(m, ds)
				}
				r.ready(ds)
				for _, m := range r.members {
					eventually(t, "only mode "+mode+" on "+m.name, func() bool {
						got := rules(t, m.node)
						return got[mode] && got["nftables"] == (mode == "nftables")
					})
				}
				r.held("in mode " + mode)
				r.change(0, 1)
				r.served("mode "+mode+" serves", 0, 1)
				r.held("after a change in mode " + mode)
			}

			// Back.
			r.remove("nodeproxy")
			r.held("when nodeproxy is deleted")
			kubeProxy = r.c.apply(r.kubeProxyManifests(tt.from))
			r.start(kubeProxy)
			for _, m := range r.members {
				r.kubeProxyServes(m, tt.from)
			}
			r.held("when kube-proxy has started again")
			ds.Spec.Template.Spec.Containers[0].Args = []string{"run", "--cleanup"}
			for _, m := range r.members {
				p := r.inPod(m, &ds.Spec.Template.Spec, &ds.Spec.Template.Spec.Containers[0])
				if code, _ := p.exit(t); code != 0 {
					t.Errorf("--cleanup on %s: exit status %d, log:\n%s", m.name, code, p.log())
				}
				if got := rules(t, m.node); got["nftables"] || tt.from == "nftables" && got["iptables"] {
					t.Errorf("left on %s: %v", m.name, got)
				}
			}
			r.held("after --cleanup")
			r.change(0, 2)
			r.served("kube-proxy serves again", 0, 2)
			r.end()
		})
	}
}
