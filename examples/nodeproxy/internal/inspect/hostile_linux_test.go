package inspect

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// hostile has what a shell, nft, iptables-restore, ipset, ipvsadm and a terminal interpret, inside of
// quotes, inside of a comment, and after a line break.
const hostile = "evil'\"\\`>PWNED`$(>PWNED)\x1b]0;owned\a # ;\n>PWNED #\nEND\n>PWNED #\n}\ndelete table ip other\n#\ncreate BAD hash:ip\n-P INPUT DROP\n-C\n"

// hostileWorld holds objects with a text in each of their fields.
type hostileWorld struct {
	Service v1.Service
	Slice   discovery.EndpointSlice
	Node    v1.Node
	CIDR    networking.ServiceCIDR
}

func newHostileWorld() *hostileWorld {
	text := func(s string) *string { return &s }
	timeout, tcp, port, ready := int32(60), v1.ProtocolTCP, int32(8080), true
	meta := metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", Labels: map[string]string{"a": "b", discovery.LabelServiceName: "web"}, Annotations: map[string]string{"c": "d"}}
	node := meta
	node.Namespace, node.Name = "", "node-1"
	w := &hostileWorld{
		Service: v1.Service{ObjectMeta: *meta.DeepCopy()}, Slice: discovery.EndpointSlice{ObjectMeta: *meta.DeepCopy()},
		Node: v1.Node{ObjectMeta: *node.DeepCopy()}, CIDR: networking.ServiceCIDR{ObjectMeta: *node.DeepCopy(), Spec: networking.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}},
	}
	w.Service.Spec = v1.ServiceSpec{
		Type: v1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
		Ports:    []v1.ServicePort{{Name: "http", Protocol: tcp, Port: 80, NodePort: 30080, AppProtocol: text("h2c")}},
		Selector: map[string]string{"e": "f"}, ExternalIPs: []string{"203.0.113.1"}, LoadBalancerIP: "203.0.113.2", LoadBalancerSourceRanges: []string{"198.51.100.0/24"},
		SessionAffinity: v1.ServiceAffinityClientIP, SessionAffinityConfig: &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &timeout}},
		ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal, HealthCheckNodePort: 32000, LoadBalancerClass: text("x"), TrafficDistribution: text("PreferClose"),
	}
	w.Service.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.3"}, {Hostname: "h"}}
	w.Slice.AddressType, w.Slice.Ports = discovery.AddressTypeIPv4, []discovery.EndpointPort{{Name: text("http"), Protocol: &tcp, Port: &port, AppProtocol: text("h2c")}}
	w.Slice.Endpoints = []discovery.Endpoint{{
		Addresses: []string{"10.1.0.2"}, Conditions: discovery.EndpointConditions{Ready: &ready}, Hostname: text("h"), NodeName: text("node-1"), Zone: text("z"),
		TargetRef: &v1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: "p"}, Hints: &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "z"}}},
	}}
	w.Node.Spec.PodCIDR, w.Node.Spec.PodCIDRs = "10.1.0.0/24", []string{"10.1.0.0/24"}
	w.Node.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "192.0.2.1"}}
	return w
}

// texts calls f with the path of each text in v, and with a function that sets it.
func texts(v reflect.Value, path string, f func(path string, set func(string))) {
	switch v.Kind() {
	case reflect.String:
		f(path, v.SetString)
	case reflect.Pointer:
		if !v.IsNil() {
			texts(v.Elem(), path, f)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				texts(v.Field(i), path+"."+v.Type().Field(i).Name, f)
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			texts(v.Index(i), fmt.Sprintf("%s[%d]", path, i), f)
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			value := v.MapIndex(k)
			f(path+"."+k.String(), func(s string) { v.SetMapIndex(k, reflect.ValueOf(s)) })
			f(path+"."+k.String()+" (key)", func(s string) {
				v.SetMapIndex(k, reflect.Value{})
				v.SetMapIndex(reflect.ValueOf(s), value)
			})
		}
	}
}

// changed returns a world in which the text at a path is another one.
func changed(path, text string) *hostileWorld {
	w := newHostileWorld()
	texts(reflect.ValueOf(w).Elem(), "", func(at string, set func(string)) {
		if at == path {
			set(text)
		}
	})
	return w
}

// world hands in the objects, whatever an API server would do with them.
func (h *hostileWorld) world(t *testing.T, cfg *config.Config, log *slog.Logger) *objects.World {
	t.Helper()
	w := must.Get(objects.New(cfg, nil, &h.Node, objects.WorldHooks{Keep: true, Failed: func(error) {}}, log))(t)
	w.SetServiceCIDR(&h.CIDR)
	w.SetNode(&h.Node)
	w.SetService(&h.Service)
	w.SetSlice(&h.Slice)
	w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return w
}

// TestTextsOfObjectsAreNoCommands writes what a shell and other programs interpret into each field of each object,
// in each mode, and has the programs read what render prints. They must do the same as with a plain text in the
// field. No verb prints what a terminal interprets.
func TestTextsOfObjectsAreNoCommands(t *testing.T) {
	var paths []string
	texts(reflect.ValueOf(newHostileWorld()).Elem(), "", func(path string, _ func(string)) { paths = append(paths, path) })
	if len(paths) < 60 {
		t.Fatalf("only %d texts: %q", len(paths), paths)
	}
	for mode, read := range map[string]func(*testing.T, *netlab.Host, ...string) string{
		config.ModeNFTables: readByNFT, config.ModeIPTables: readByIPTables, config.ModeIPVS: readByShell,
	} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			netlab.NeedPrograms(t, "nft", "iptables-restore", "iptables-save", "ip6tables-restore", "ip6tables-save", "ipset")
			h := netlab.NewHost(t)
			cfg := configtest.Parsed(t, []string{"run", "--hostname-override", "node-1", "--proxy-mode", mode, "--cluster-cidr", "10.1.0.0/16"})
			render := func(from, to *ruleset.Snapshot) string {
				var out bytes.Buffer
				if err := writeRules(&out, slog.New(slog.DiscardHandler), cfg, from, to); err != nil && (from == nil || err != cli.StatusError(1)) {
					t.Fatal(err)
				}
				return out.String()
			}
			base := newHostileWorld().world(t, cfg, slog.New(slog.DiscardHandler)).Engine.Snapshot()
			// The script, before the scripts of a difference.
			all := render(nil, base)
			different := 0
			for _, path := range paths {
				var diag bytes.Buffer
				w := changed(path, hostile).world(t, cfg, cli.OwnLogger(cfg, &diag))
				evil, plain := w.Engine.Snapshot(), changed(path, "plain").world(t, cfg, slog.New(slog.DiscardHandler)).Engine.Snapshot()
				var said bytes.Buffer
				if err := explainAll(&said, w); err != nil && !errors.Is(err, errCannotWork) {
					t.Fatal(err)
				}
				packet := ruleset.Packet{To: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: v1.ProtocolTCP}
				must.Get((explainOptions{from: "10.1.0.9"}).ask(&said, w, packet))(t)
				for _, got := range []string{render(nil, evil), render(base, evil), render(evil, base), said.String(), diag.String()} {
					if harmless := printed(got); harmless != got {
						t.Errorf("%s: a verb prints %q", path, got)
					}
				}
				for _, c := range [][2][]string{
					{{render(nil, plain)}, {render(nil, evil)}},
					{{all, render(base, plain)}, {all, render(base, evil)}},
					{{render(nil, plain), render(plain, base)}, {render(nil, evil), render(evil, base)}},
				} {
					if reflect.DeepEqual(c[0], c[1]) {
						continue
					}
					different++
					if more := moreLines(read(t, h, c[1]...), read(t, h, c[0]...)); len(more) != 0 {
						t.Errorf("%s: leads to\n%s\nas a plain text does not:\n%s", path, strings.Join(more, ""), c[1])
					}
				}
			}
			// The namespace and the name of the Service, and the name of its port. Mode ipvs has them in comments alone.
			if different < 2*3 {
				t.Errorf("only %d texts differ from a plain one", different)
			}
		})
	}
}

// moreLines returns the lines that a has more often than b. Mode iptables has no rules for a name that is not valid
// in Kubernetes.
func moreLines(a, b string) (out []string) {
	has := map[string]int{}
	for line := range strings.Lines(b) {
		has[line]++
	}
	for line := range strings.Lines(a) {
		if has[line]--; has[line] < 0 {
			out = append(out, line)
		}
	}
	return out
}

// printed returns a text as lines that a terminal may show.
func printed(s string) string {
	var b bytes.Buffer
	_, _ = cli.Lines{W: &b}.Write([]byte(s))
	return b.String()
}

// runWith runs a program with an input. The result has its exit status and what it printed.
func runWith(t *testing.T, h *netlab.Host, input string, c *exec.Cmd) string {
	t.Helper()
	c.Stdin = strings.NewReader(input)
	var out []byte
	must.Do(t, h.Do(func() (err error) {
		out, err = c.CombinedOutput()
		if errors.As(err, new(*exec.ExitError)) {
			out, err = fmt.Appendf(out, "%v\n", err), nil
		}
		return err
	}))
	return string(out)
}

// readByNFT has nft read scripts, and returns what there is then: each object without its comment, and the
// number of elements of each set.
func readByNFT(t *testing.T, h *netlab.Host, scripts ...string) string {
	t.Helper()
	out := runWith(t, h, "flush ruleset\nadd table ip other\n", netlab.Command(t, "nft", "-f", "-"))
	for _, s := range scripts {
		out += runWith(t, h, s, netlab.Command(t, "nft", "-f", "-"))
	}
	list := runWith(t, h, "", netlab.Command(t, "nft", "list", "ruleset"))
	var b strings.Builder
	for line := range strings.Lines(list) {
		before, _, _ := strings.Cut(line, ` comment "`)
		fmt.Fprintln(&b, before, strings.Count(line, "comment"))
	}
	return out + b.String()
}

// readByIPTables has iptables-restore and ip6tables-restore read scripts, and returns a line for each chain and each
// rule, with the policy of a chain of the kernel.
func readByIPTables(t *testing.T, h *netlab.Host, scripts ...string) (out string) {
	t.Helper()
	for _, program := range []string{"iptables", "ip6tables"} {
		out += runWith(t, h, "*nat\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:PREROUTING ACCEPT\n:POSTROUTING ACCEPT\nCOMMIT\n*filter\n:INPUT ACCEPT\n:OUTPUT ACCEPT\n:FORWARD ACCEPT\nCOMMIT\n", netlab.Command(t, program+"-restore"))
	}
	for _, s := range scripts {
		four, six, _ := strings.Cut(s, "# ip6tables-restore --noflush\n")
		out += runWith(t, h, four, netlab.Command(t, "iptables-restore", "--noflush"))
		out += runWith(t, h, six, netlab.Command(t, "ip6tables-restore", "--noflush"))
	}
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		for line := range strings.Lines(runWith(t, h, "", netlab.Command(t, program))) {
			if fields := strings.Fields(line); line[0] == ':' && fields[1] != "-" {
				out += line
			} else if line[0] != '#' {
				out += line[:2] + "\n"
			}
		}
	}
	return out
}

// readByShell has a shell run scripts in an empty folder. The result has each call of a program with the number of
// lines of its input, and the files in the folder. ipset and iptables-restore read their inputs; IPVS is not there.
func readByShell(t *testing.T, h *netlab.Host, scripts ...string) (out string) {
	t.Helper()
	dir := t.TempDir()
	bin, work := filepath.Join(dir, "bin"), filepath.Join(dir, "work")
	for _, d := range []string{bin, work} {
		must.Do(t, os.Mkdir(d, 0o755))
	}
	for _, name := range []string{"ipvsadm", "ipset", "ip", "iptables-restore", "ip6tables-restore", "nft"} {
		text := "#!/bin/sh\nPATH=" + os.Getenv("PATH") + "\nin=$(cat)\necho " + name + " \"$*\" $(echo \"$in\" | wc -l)\n"
		if name == "ipset" || strings.HasSuffix(name, "restore") {
			text += "echo \"$in\" | " + name + " \"$@\" 2>&1\n"
		}
		must.Do(t, os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755))
	}
	for _, program := range []string{"iptables", "ip6tables"} {
		out += runWith(t, h, "*mangle\nCOMMIT\n*nat\nCOMMIT\n*filter\nCOMMIT\n", netlab.Command(t, program+"-restore"))
	}
	out += runWith(t, h, "", netlab.Command(t, "ipset", "destroy"))
	for _, s := range scripts {
		sh := netlab.Command(t, "sh")
		sh.Dir, sh.Env = work, []string{"PATH=" + bin}
		out += runWith(t, h, s, sh)
	}
	left := must.Get(os.ReadDir(work))(t)
	return out + fmt.Sprintln(left)
}

// TestRefusedObjectsAreNotRendered writes a text into each field of manifests. Render must leave out an object that
// an API server would refuse, name it, and print nothing of it.
func TestRefusedObjectsAreNotRendered(t *testing.T) {
	t.Parallel()
	write := func(h *hostileWorld) string {
		dir := t.TempDir()
		h.Service.TypeMeta, h.Slice.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
		for name, o := range map[string]any{"service.yaml": h.Service, "slice.yaml": h.Slice} {
			text := must.Get(yaml.Marshal(o))(t)
			must.Do(t, os.WriteFile(filepath.Join(dir, name), text, 0o600))
		}
		return dir
	}
	render := func(args ...string) (out, log string, err error) {
		var o, diag bytes.Buffer
		c := RenderCommand(&cli.Program{Out: &o, Diag: &diag})
		c.SilenceErrors, c.SilenceUsage = true, true
		c.SetArgs(append([]string{"--hostname-override", "node-1", "--proxy-mode", "ipvs"}, args...))
		err = c.ExecuteContext(t.Context())
		return o.String(), diag.String(), err
	}
	empty, _, err := render("--manifests", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{".Service.ObjectMeta.Namespace", ".Service.ObjectMeta.Name", ".Service.Spec.Ports[0].Name", ".Service.Spec.Ports[0].Protocol"} {
		dir := write(changed(path, hostile))
		got, log, err := render("--manifests", dir)
		if got != empty || err != nil || !strings.Contains(log, "left out an object of the manifests") || printed(log) != log {
			t.Errorf("%s: error %v, log:\n%s\nprints\n%s", path, err, log, got)
		}
		diff, log, err := render("--manifests", write(newHostileWorld()), "--diff", dir)
		if err != cli.StatusError(1) || strings.Contains(diff, "PWNED") || !strings.Contains(diff, "-shop/web:http/TCP/IPv4\n") || !strings.Contains(log, "left out") {
			t.Errorf("%s: error %v, log:\n%s\nprints\n%s", path, err, log, diff)
		}
	}
}

// TestTopAndLogsPrintLines checks what does not pass the text of explain and render.
func TestTopAndLogsPrintLines(t *testing.T) {
	top := row{rowName: rowName{Service: "ns/" + hostile, Port: "p\n", Protocol: "TCP", Family: "IPv4"}}
	if got := plain([]row{top}); printed(got) != got || strings.Count(got, "\n") != 2 {
		t.Errorf("top prints %q", got)
	}
	var diag bytes.Buffer
	cfg := configtest.Parsed(t, []string{"run"})
	log := cli.OwnLogger(cfg, &diag)
	log.Warn("a", "error", errors.New(hostile), "text", hostile)
	complaint.NewLog(log).Write(slog.LevelWarn, complaint.Object{Kind: "service", Namespace: "ns", Name: hostile}, "b", "error", errors.New(hostile))
	if got := diag.String(); printed(got) != got || !strings.Contains(got, `owned`) {
		t.Errorf("logged %q", got)
	}
}
