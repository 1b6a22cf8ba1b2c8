//go:build linux

package wholeagent

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

const troubleshootingPage = "../../deploy/TROUBLESHOOTING.md"

// pageCase is a case of the page: the blocks of commands below a heading of level 3, and the lines
// that the page quotes of their output.
type pageCase struct {
	name  string
	steps []pageStep
}

type pageStep struct{ commands, output string }

// pageCases parses the page.
func pageCases(t *testing.T) (out []pageCase) {
	t.Helper()
	text := must.Get(os.ReadFile(troubleshootingPage))(t)
	for _, part := range strings.Split("\n"+string(text), "\n### ")[1:] {
		part, _, _ = strings.Cut(part, "\n## ")
		name, rest, _ := strings.Cut(part, "\n")
		c := pageCase{name: name}
		blocks := strings.Split(rest, "```")
		for i := 1; i+1 < len(blocks); i += 2 {
			kind, body, _ := strings.Cut(blocks[i], "\n")
			switch {
			case kind == "sh":
				c.steps = append(c.steps, pageStep{commands: body})
			case kind == "text" && len(c.steps) != 0 && strings.TrimSpace(blocks[i-1]) == "":
				c.steps[len(c.steps)-1].output = body
			default:
				t.Errorf("%s: block %q is neither sh nor text below it", name, kind)
			}
		}
		out = append(out, c)
	}
	return out
}

// stage is the demo's network, in which the cases are played. An agent serves the manifests unless a
// case ends it.
type stage struct {
	*lab.Lab
	t     *testing.T // of the case
	all   *testing.T // of all cases
	dir   string     // of the manifests
	flags []string   // of the agent and of explain and trace
	bin   string
	agent *process
	talk  *lab.Talk // over UDP
	gone  string    // the pod that answered it
}

// play is how a case is played. Before the commands, cause makes the fault, and checks the symptom. While they
// run, traffic is called again and again. Afterwards mend removes the fault if the commands have not, and
// checks that the symptom is gone.
type play struct{ cause, traffic, mend func(s *stage) }

// run starts the agent, and waits until it serves.
func (s *stage) run(more ...string) {
	s.t.Helper()
	s.agent = embed(s.all, s.Node, append(append([]string{"run"}, s.flags...), more...)...)
	eventually(s.t, "the agent is ready", func() bool {
		code, _, _ := get(s.t, s.Node, "http://127.0.0.1:10256/readyz")
		return code == http.StatusOK
	})
}

// stop ends the agent.
func (s *stage) stop() {
	s.t.Helper()
	s.agent.stop(s.t)
}

// rerun replaces the agent by one with more flags.
func (s *stage) rerun(more ...string) {
	s.t.Helper()
	s.stop()
	s.run(more...)
}

// edit replaces text in a manifest.
func (s *stage) edit(file, old, new string) {
	s.t.Helper()
	text := must.Get(os.ReadFile(filepath.Join(s.dir, file)))(s.t)
	if !strings.Contains(string(text), old) {
		s.t.Fatalf("%s has no %q", file, old)
	}
	put(s.t, s.dir, file, strings.ReplaceAll(string(text), old, new))
}

// restore replaces the manifests by those of the demo.
func (s *stage) restore() {
	s.t.Helper()
	files := must.Get(filepath.Glob("../demo/world/*.yaml"))(s.t)
	for _, f := range files {
		text := must.Get(os.ReadFile(f))(s.t)
		if now, err := os.ReadFile(filepath.Join(s.dir, filepath.Base(f))); err != nil || string(now) != string(text) {
			put(s.t, s.dir, filepath.Base(f), string(text))
		}
	}
}

// sh runs commands on the node, and returns their output.
func (s *stage) sh(commands string) string {
	s.t.Helper()
	cmd := netlab.Command(s.t, "bash", "-c", commands)
	cmd.Env = append(os.Environ(), "PATH="+s.bin+":"+os.Getenv("PATH"), "FLAGS="+strings.Join(s.flags, " "), "LC_ALL=C")
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	must.Do(s.t, s.Node.Start(cmd))
	_ = cmd.Wait() // explain and others exit with 1 if they found something
	return out.String()
}

// The Services of the demo, as the page names them.
const (
	pageWeb, pageCart, pageEmpty, pageDNS = "10.96.0.10:80", "10.96.0.30:80", "10.96.0.40:80", "10.96.0.53:53"
	pageWebLB, pageLocalLB, pageWebPort   = "203.0.113.80:80", "203.0.113.81:80", "192.0.2.1:30080"
	pageOtherWebPort, pageNoService       = "198.51.100.1:30080", "10.96.0.250:80"
)

// answers, refuses and silent wait until a connection has this result.
func (s *stage) answers(h *netlab.Host, from, to string) {
	s.t.Helper()
	eventually(s.t, to+" answers", func() bool { _, _, err := lab.VisitSoon(h, from, to); return err == nil })
}

func (s *stage) refuses(h *netlab.Host, to string) {
	s.t.Helper()
	eventually(s.t, to+" refuses", func() bool { _, _, err := lab.VisitSoon(h, "", to); return errors.Is(err, syscall.ECONNREFUSED) })
}

func (s *stage) silent(h *netlab.Host, from, to string) {
	s.t.Helper()
	eventually(s.t, to+" does not answer", func() bool { _, _, err := lab.VisitSoon(h, from, to); return lab.IsTimeout(err) })
}

// someSilent waits until a connection to the Service web gets no answer, or until many in a row get one.
func (s *stage) someSilent(want bool) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("some connections get no answer: %v", want), func() bool {
		for range 30 {
			if _, _, err := lab.VisitSoon(s.Pod1, "", pageWeb); err != nil {
				return want && lab.IsTimeout(err)
			}
		}
		return !want
	})
}

func (s *stage) nft(h *netlab.Host, commands string) {
	s.t.Helper()
	must.Get(h.Run(s.t, "nft", commands))(s.t)
}

// healthz waits until /healthz answers with a status.
func (s *stage) healthz(want int) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("/healthz answers %d", want), func() bool {
		code, _, _ := get(s.t, s.Node, "http://127.0.0.1:10256/healthz")
		return code == want
	})
}

// visits makes connections to the Service web.
func visits(s *stage) { _, _, _ = lab.VisitSoon(s.Pod1, "", pageWeb) }

// plays has each case of the page by its heading.
var plays = map[string]play{
	"No Service has the address": {
		cause: func(s *stage) { s.silent(s.Pod1, "", pageNoService) },
		mend:  func(s *stage) { s.answers(s.Pod1, "", pageWeb) },
	},
	"The client is not in the source ranges": {
		cause: func(s *stage) { s.silent(s.Client, lab.StrangerAddr[0], pageWebLB) },
		mend:  func(s *stage) { s.answers(s.Client, lab.ClientAddr[0], pageWebLB) },
	},
	"This node has no endpoint, and the policy is Local": {
		cause: func(s *stage) {
			s.edit("endpoints-others.yaml", "- {addresses: [10.1.1.2], nodeName: node-1} # pod-1\n", "")
			s.silent(s.Client, "", pageLocalLB)
		},
		mend: func(s *stage) { s.restore(); s.answers(s.Client, "", pageLocalLB) },
	},
	"A firewall drops the packets": {
		cause: func(s *stage) {
			s.nft(s.Node, "table inet guard { chain f { type filter hook forward priority 0; ip daddr 10.1.2.0/24 drop; }; }")
			s.someSilent(true)
		},
		traffic: visits,
		mend:    func(s *stage) { s.someSilent(false) },
	},
	"An endpoint does not answer": {
		cause: func(s *stage) {
			s.nft(s.Pod2, "table inet broken { chain i { type filter hook input priority 0; tcp dport 8080 drop; }; }")
			s.someSilent(true)
		},
		traffic: visits,
		mend:    func(s *stage) { s.nft(s.Pod2, "delete table inet broken"); s.someSilent(false) },
	},
	"The node does not forward packets": {
		cause: func(s *stage) { must.Do(s.t, s.Node.Sysctl("net/ipv4/ip_forward", "0")); s.silent(s.Pod1, "", pageWeb) },
		mend:  func(s *stage) { s.answers(s.Pod1, "", pageWeb) },
	},
	"No endpoint is ready": {
		cause: func(s *stage) {
			s.edit("endpoints-web.yaml", "nodeName: node-1}", "nodeName: node-1, conditions: {ready: false}}")
			s.edit("endpoints-web.yaml", "nodeName: node-2}", "nodeName: node-2, conditions: {ready: false}}")
			s.refuses(s.Pod1, pageWeb)
		},
		mend: func(s *stage) { s.restore(); s.answers(s.Pod1, "", pageWeb) },
	},
	"The Service has no endpoints": {
		cause: func(s *stage) { s.refuses(s.Pod1, pageEmpty) },
		mend: func(s *stage) {
			put(s.t, s.dir, "empty.yaml", `{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: e, namespace: shop, labels: {kubernetes.io/service-name: empty}},
addressType: IPv4, ports: [{name: http, port: 8080}], endpoints: [{addresses: [10.1.1.3]}]}`)
			s.answers(s.Pod1, "", pageEmpty)
			must.Do(s.t, os.Remove(filepath.Join(s.dir, "empty.yaml")))
			s.refuses(s.Pod1, pageEmpty)
		},
	},
	"The Service has no such port": {
		cause: func(s *stage) { s.refuses(s.Pod1, "10.96.0.10:81") },
		mend:  func(s *stage) { s.answers(s.Pod1, "", pageWeb) },
	},
	"The agent has ended": {
		cause: func(s *stage) {
			s.stop()
			s.edit("endpoints-web.yaml", "- {addresses: [10.1.1.3], nodeName: node-1} # pod-2\n", "")
			eventually(s.t, "the old endpoint gets connections", func() bool { return lab.Visits(s.Client, "", pageWeb, 20).Answers["pod-2"] > 0 })
		},
		mend: func(s *stage) { s.run(); s.webOf("pod-1", "pod-3"); s.restore(); s.webOf("pod-1", "pod-2", "pod-3") },
	},
	"A firewall deleted the rules": {
		cause: func(s *stage) { s.stop(); s.nft(s.Node, "flush ruleset"); s.silent(s.Pod1, "", pageWeb) },
		mend:  func(s *stage) { s.run(); s.answers(s.Pod1, "", pageWeb) },
	},
	"A firewall emptied the rules": {
		cause: func(s *stage) { s.stop(); s.nft(s.Node, "flush table ip proxier"); s.silent(s.Pod1, "", pageWeb) },
		mend:  func(s *stage) { s.run(); s.answers(s.Pod1, "", pageWeb) },
	},
	"The node is about to be removed": {
		cause: func(s *stage) {
			s.edit("node.yaml", "spec:\n  podCIDRs", "spec:\n  taints: [{key: ToBeDeletedByClusterAutoscaler, effect: NoSchedule}]\n  podCIDRs")
			s.healthz(http.StatusServiceUnavailable)
		},
		mend: func(s *stage) { s.restore(); s.healthz(http.StatusOK) },
	},
	"The API server does not know the node": {
		cause: func(s *stage) {
			s.withAPI("node-x", "")
			s.healthz(http.StatusServiceUnavailable)
		},
		mend: func(s *stage) { s.withAPI("node-1", ""); s.healthz(http.StatusOK); s.rerun() },
	},
	"The API server refuses the agent": {
		cause: func(s *stage) {
			s.withAPI("node-1", "EndpointSlice")
			s.healthz(http.StatusServiceUnavailable)
			s.agent.logged(s.t, "cannot read from the API server")
		},
		mend: func(s *stage) { s.rerun(); s.healthz(http.StatusOK) },
	},
	"Rules of another proxy are left": {
		cause: func(s *stage) {
			needMode(s.t, "iptables")
			startKubeProxy(s.t, s.Node, "iptables", false, podIPs[0])
		},
		mend: func(s *stage) {
			s.rerun("--adopt-from-kube-proxy")
			eventually(s.t, "kube-proxy's rules are gone", func() bool { return !rules(s.t, s.Node)["kube-proxy iptables"] })
			s.rerun()
		},
	},
	"The configuration file is invalid": {
		cause: func(s *stage) {
			const valid = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
			put(s.t, s.bin, "config.yaml", valid)
			s.rerun("--config", s.bin+"/config.yaml")
			put(s.t, s.bin, "config.yaml", valid+"mode: fast\n")
			s.agent.logged(s.t, "the changed configuration file is invalid")
		},
		mend: func(s *stage) { s.rerun() },
	},
	"Another Service has the address": {
		cause: func(s *stage) {
			s.edit("services.yaml", "203.0.113.80", "203.0.113.81")
			s.silent(s.Client, "", pageWebLB)
		},
		mend: func(s *stage) { s.restore(); s.answers(s.Client, "", pageWebLB) },
	},
	"All connections go to one pod": {
		cause: func(s *stage) {
			if y := lab.Visits(s.Pod2, "", pageCart, 20); len(y.Errs) != 0 || len(y.Answers) != 1 {
				s.t.Error(y)
			}
		},
		traffic: func(s *stage) { lab.Visits(s.Pod2, "", pageCart, 1) },
		mend: func(s *stage) {
			s.edit("services.yaml", "  sessionAffinity: ClientIP\n  sessionAffinityConfig: {clientIP: {timeoutSeconds: 600}}\n", "")
			eventually(s.t, "all pods get connections", func() bool { return lab.Visits(s.Pod2, "", pageCart, 30).Answered("pod-1", "pod-2", "pod-3") })
			s.restore()
		},
	},
	"Changes take long": {
		cause: func(s *stage) {
			s.rerun("--min-sync-period", "30s")
			s.edit("endpoints-web.yaml", "- {addresses: [10.1.1.3], nodeName: node-1} # pod-2\n", "")
			eventually(s.t, "the change waits", func() bool {
				return strings.Contains(s.sh("curl -s localhost:10249/metrics"), "kubeproxy_sync_proxy_rules_endpoint_changes_pending 1\n")
			})
		},
		mend: func(s *stage) { s.rerun(); s.webOf("pod-1", "pod-3"); s.restore(); s.webOf("pod-1", "pod-2", "pod-3") },
	},
	"The policy is Cluster": {
		cause: func(s *stage) {
			s.source(s.Client, pageWebPort, "pod-3", lab.NodeAddr[0])
		},
		mend: func(s *stage) {
			s.edit("services.yaml", "  loadBalancerSourceRanges:", "  externalTrafficPolicy: Local\n  loadBalancerSourceRanges:")
			s.source(s.Client, pageWebPort, "pod-1", lab.ClientAddr[0])
			s.restore()
		},
	},
	"The agent does not know the addresses of pods": {
		cause: func(s *stage) {
			s.flags[slices.Index(s.flags, "--cluster-cidr")+1] = "10.9.0.0/16"
			s.rerun()
			s.source(s.Pod1, pageWeb, "pod-3", lab.NodeAddr[0])
		},
		mend: func(s *stage) {
			s.flags[slices.Index(s.flags, "--cluster-cidr")+1] = "10.1.0.0/16,fd00:10:1::/48"
			s.rerun()
			s.source(s.Pod1, pageWeb, "pod-3", lab.PodAddr["pod-1"][0])
		},
	},
	"The address has no NodePorts": {
		cause: func(s *stage) { s.refuses(s.Client, pageOtherWebPort) },
		mend: func(s *stage) {
			s.rerun("--nodeport-addresses", "0.0.0.0/0,::/0")
			s.answers(s.Client, "", pageOtherWebPort)
			s.rerun()
		},
	},
	"A flow keeps an endpoint that is gone": {
		cause: func(s *stage) {
			netlab.NeedPrograms(s.t, "conntrack")
			c, err := lab.Dial(s.Pod2, "udp", "", pageDNS, testtime.Timeout)
			must.Do(s.t, err)
			s.t.Cleanup(func() { c.Close() })
			pod, _, err := c.Ask()
			must.Do(s.t, err)
			s.stop()
			s.edit("endpoints-dns.yaml", "- {addresses: ["+lab.PodAddr[pod][0]+"], nodeName: ", "- {addresses: [10.1.2.3], nodeName: ")
			if again, _, err := c.Ask(); err != nil || again != pod {
				s.t.Errorf("%s answers, error %v", again, err)
			}
			s.talk, s.gone = c, pod
		},
		mend: func(s *stage) {
			s.run()
			eventually(s.t, "another endpoint answers", func() bool {
				pod, _, err := s.talk.Ask()
				must.Do(s.t, err)
				return pod != s.gone
			})
			s.restore()
		},
	},
}

// webOf waits until exactly these pods get connections to the Service web.
func (s *stage) webOf(pods ...string) {
	s.t.Helper()
	eventually(s.t, fmt.Sprint("the pods are ", pods), func() bool { return lab.Visits(s.Client, "", pageWeb, 30).Answered(pods...) })
}

// source waits until a pod sees connections to an address only from one source.
func (s *stage) source(h *netlab.Host, to, pod, source string) {
	s.t.Helper()
	eventually(s.t, pod+" sees "+source, func() bool { return lab.Visits(h, "", to, 30).Saw(pod, source) })
}

// withAPI replaces the agent by one that follows an API server with a Service and the Node node-1,
// which refuses a kind if that is not "".
func (s *stage) withAPI(node, refuses string) {
	s.t.Helper()
	l, err := s.Node.Listen("tcp", "127.0.0.1:0")
	must.Do(s.t, err)
	server := &http.Server{Handler: &fakeAPI{refuses: refuses, objects: map[string]string{
		"Node":          `{"kind":"Node","apiVersion":"v1","metadata":{"name":"node-1","resourceVersion":"1"},"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"}]}}`,
		"Service":       `{"kind":"Service","apiVersion":"v1","metadata":{"name":"kubernetes","namespace":"default","resourceVersion":"1"},"spec":{"clusterIP":"10.96.0.1","ports":[{"name":"https","port":443}]}}`,
		"EndpointSlice": `{"kind":"EndpointSlice","apiVersion":"discovery.k8s.io/v1","metadata":{"name":"kubernetes","namespace":"default","labels":{"kubernetes.io/service-name":"kubernetes"}},"addressType":"IPv4","endpoints":[],"ports":[]}`,
	}}}
	go server.Serve(l)
	s.t.Cleanup(func() { server.Close() })
	put(s.t, s.bin, "kubeconfig", `{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "http://`+l.Addr().String()+`"}}], contexts: [{name: c, context: {cluster: c}}], current-context: c}`)
	s.stop()
	s.agent = start(s.all, s.Node, "run", "--kubeconfig", s.bin+"/kubeconfig", "--hostname-override", node)
}

// TestTroubleshootingCasesArePlayed plays each case of the page TROUBLESHOOTING.md in the demo's
// network, runs the commands of the page on its node, and compares what the page quotes of the output.
func TestTroubleshootingCasesArePlayed(t *testing.T) {
	t.Parallel()
	netlab.NeedPrograms(t, "bash", "nft", "curl", "sysctl")
	cases := pageCases(t)
	d, dir, flags := newDemoNetwork(t)
	s := &stage{Lab: d, dir: dir, flags: flags, bin: t.TempDir(), t: t, all: t}
	wrapper := "#!/bin/sh\nexec env " + programEnv + "=1 " + testBinary(t) + " \"$@\"\n"
	must.Do(t, os.WriteFile(filepath.Join(s.bin, "nodeproxy"), []byte(wrapper), 0o755))
	s.run()
	played := map[string]bool{}
	for _, c := range cases {
		p, ok := plays[c.name]
		if !ok || len(c.steps) == 0 || played[c.name] {
			t.Errorf("the case %q has %d commands, and is played here: %v", c.name, len(c.steps), ok)
			continue
		}
		played[c.name] = true
		t.Run(c.name, func(t *testing.T) {
			s.t = t
			begin := time.Now()
			p.cause(s)
			var stop atomic.Bool
			var wg sync.WaitGroup
			if p.traffic != nil {
				for range 4 {
					wg.Go(func() {
						for !stop.Load() {
							p.traffic(s)
						}
					})
				}
			}
			for _, step := range c.steps {
				compareQuoted(t, step, s.sh(step.commands))
			}
			stop.Store(true)
			wg.Wait()
			p.mend(s)
			t.Logf("%v", time.Since(begin))
		})
	}
	for name := range plays {
		if !played[name] {
			t.Errorf("the page has no case %q", name)
		}
	}
}

// compareQuoted checks that an output has the lines that the page quotes, in their order. "…" stands for any
// text.
func compareQuoted(t *testing.T, step pageStep, output string) {
	t.Helper()
	lines := strings.Split(output, "\n")
	for line := range strings.Lines(step.output) {
		quoted := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSuffix(line, "\n")), "…", ".*") + "$")
		at := slices.IndexFunc(lines, quoted.MatchString)
		if at < 0 {
			t.Errorf("the page quotes %q. The output of\n%s is\n%s", line, step.commands, output)
			return
		}
		lines = lines[at+1:]
	}
}
