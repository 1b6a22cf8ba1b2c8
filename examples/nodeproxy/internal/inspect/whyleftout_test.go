package inspect

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// world is a Service shop/web with one EndpointSlice, for a case to change.
type world struct {
	service v1.Service
	slice   discovery.EndpointSlice
	// more are other Services.
	more  []*v1.Service
	flags []string
	node  *v1.Node
	// families is nil for both.
	families []tracker.Family
}

func newWorld() *world {
	w := &world{}
	w.service.Namespace, w.service.Name = "shop", "web"
	w.service.CreationTimestamp = metav1.Unix(2, 0)
	w.service.Spec.ClusterIP, w.service.Spec.ClusterIPs, w.service.Spec.IPFamilies = "10.96.0.1", []string{"10.96.0.1"}, []v1.IPFamily{v1.IPv4Protocol}
	w.service.Spec.Ports = []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}}
	name, number, node := "http", int32(8080), "n1"
	w.slice.Namespace, w.slice.Name, w.slice.AddressType = "shop", "web-1", discovery.AddressTypeIPv4
	w.slice.Labels = map[string]string{discovery.LabelServiceName: "web"}
	w.slice.Ports = []discovery.EndpointPort{{Name: &name, Port: &number}}
	w.slice.Endpoints = []discovery.Endpoint{{Addresses: []string{"10.1.0.2"}, NodeName: &node}}
	return w
}

// explain returns what explain prints about TCP to an address, and with --all.
func (x *world) explain(t *testing.T, to string) (one, all string) {
	t.Helper()
	cfg := configtest.Parsed(t, append([]string{"run", "--manifests", t.TempDir(), "--hostname-override", "n1"}, x.flags...))
	w := must.Get(objects.New(cfg, x.families, x.node, objects.WorldHooks{Keep: true}, slog.New(slog.DiscardHandler)))(t)
	for _, s := range append(x.more, &x.service) {
		w.SetService(s)
	}
	w.SetSlice(&x.slice)
	w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	var out strings.Builder
	p := ruleset.Packet{To: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP}
	from := "192.0.2.9"
	if p.To.Addr().Is6() {
		from = "2001:db8::9"
	}
	must.Get((explainOptions{from: from}).ask(&out, w, p))(t)
	one = out.String()
	out.Reset()
	err := explainAll(&out, w)
	// A line of a Service port that cannot work, or of an object that cannot be used.
	if cannot := strings.Count(out.String(), "\n") > 1; errors.Is(err, errCannotWork) != cannot {
		t.Errorf("explain --all returns %v, and prints\n%s", err, &out)
	}
	return one, out.String()
}

// TestExplainNamesWhatExcludedAnObject has an object for each reason of package tracker that the
// agent can have.
func TestExplainNamesWhatExcludedAnObject(t *testing.T) {
	proxy := v1.LoadBalancerIPModeProxy
	ingress := func(in v1.LoadBalancerIngress) func(*world) {
		return func(w *world) { w.service.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{in} }
	}
	no, yes := false, true
	endpoint := func(e discovery.Endpoint) func(*world) {
		return func(w *world) {
			e.Addresses = []string{"10.1.0.3"}
			w.slice.Endpoints = append(w.slice.Endpoints, e)
		}
	}
	covered := map[string]bool{
		"ReasonFiltered":   true, // the agent has no Filter
		"ReasonHookFailed": true, // the agent's hooks only warn
	}
	for _, c := range []struct {
		reason string // the name of the constant
		edit   func(*world)
		to     string // 10.96.0.1:80 if empty
		one    string // a line of explain, without the reason
		all    string // the same of explain --all, "" if it does not name the reason
	}{
		// What explain derived from what was left, and named wrongly.
		{reason: "AddressType", edit: func(w *world) {
			w.slice.AddressType, w.slice.Endpoints[0].Addresses = discovery.AddressTypeFQDN, []string{"db.example.com"}
		}, one: `because: EndpointSlice shop/web-1: address type "FQDN" is not supported`,
			all: `shop/web:http/TCP/IPv4: has no endpoints on any node: EndpointSlice shop/web-1: address type "FQDN" is not supported`},
		{reason: "NoPortNumber", edit: func(w *world) { w.slice.Ports[0].Port = nil }, one: `because: EndpointSlice shop/web-1: port "http" has no number`,
			all: `shop/web:http/TCP/IPv4: has no endpoints on any node: EndpointSlice shop/web-1: port "http" has no number`},
		{reason: "HeadlessLabel", edit: func(w *world) { w.slice.Labels[v1.IsHeadlessService] = "" },
			one: "because: EndpointSlice shop/web-1: it has the label service.kubernetes.io/headless",
			all: "shop/web:http/TCP/IPv4: has no endpoints on any node: EndpointSlice shop/web-1: it has the label service.kubernetes.io/headless"},
		{reason: "HeadlessLabel", edit: func(w *world) { w.service.Labels = map[string]string{v1.IsHeadlessService: ""} },
			one: "left out: Service shop/web: it has the label service.kubernetes.io/headless"},
		{reason: "OtherProxy", edit: func(w *world) { w.service.Labels = map[string]string{tracker.LabelServiceProxyName: "cilium"} },
			one: `left out: Service shop/web: its label service.kubernetes.io/service-proxy-name is "cilium": it is for another proxy`},
		{reason: "IPMode", edit: ingress(v1.LoadBalancerIngress{IP: "203.0.113.1", IPMode: &proxy}), to: "203.0.113.1:80",
			one: `left out: Service shop/web: load-balancer ingress "203.0.113.1" has ipMode Proxy: packets arrive with another destination`},

		{reason: "ExternalName", edit: func(w *world) { w.service.Spec.Type = v1.ServiceTypeExternalName }, one: "left out: Service shop/web: its type is ExternalName"},
		{reason: "Headless", edit: func(w *world) {
			w.service.Spec.ClusterIP, w.service.Spec.ExternalIPs = v1.ClusterIPNone, []string{"10.96.0.1"}
		},
			one: "left out: Service shop/web: headless (clusterIP: None)"},
		{reason: "NoClusterIP", edit: func(w *world) {
			w.service.Spec.ClusterIP, w.service.Spec.ClusterIPs, w.service.Spec.ExternalIPs = "", nil, []string{"10.96.0.1"}
		}, one: "left out: Service shop/web: it has no clusterIP, which an API server assigns",
			all: "shop/web: is not served: Service shop/web: it has no clusterIP, which an API server assigns"},
		{reason: "NoPorts", edit: func(w *world) { w.service.Spec.Ports = nil }, one: "left out: Service shop/web: it has no ports", all: "shop/web: is not served: Service shop/web: it has no ports"},
		{reason: "NoService", edit: func(w *world) { w.slice.Labels = nil }, all: "left out: EndpointSlice shop/web-1: no label kubernetes.io/service-name"},
		{reason: "Invalid", edit: func(w *world) { w.service.Spec.SessionAffinity = "clientIP" }, one: `left out: Service shop/web: sessionAffinity "clientIP" is unknown and counts as None`,
			all: `left out: Service shop/web: sessionAffinity "clientIP" is unknown and counts as None`},
		{reason: "PortNumber", edit: func(w *world) { w.service.Spec.Ports[0].Port = 80000 }, one: `left out: Service shop/web: port "http": number 80000 is out of range`,
			all: `shop/web:http: is not served: Service shop/web: port "http": number 80000 is out of range`},
		{reason: "PortName", edit: func(w *world) { w.slice.Ports[0].Name = nil }, one: "because: EndpointSlice shop/web-1: port 0 has a nil name",
			all: "shop/web:http/TCP/IPv4: has no endpoints on any node: EndpointSlice shop/web-1: port 0 has a nil name"},
		{reason: "Protocol", edit: func(w *world) { w.service.Spec.Ports[0].Protocol = "tcp" }, one: `left out: Service shop/web: port "http": unknown protocol "tcp"`,
			all: `shop/web:http: is not served: Service shop/web: port "http": unknown protocol "tcp"`},
		{reason: "Duplicate", edit: func(w *world) { w.slice.Endpoints = append(w.slice.Endpoints, w.slice.Endpoints[0]) },
			one: "left out: EndpointSlice shop/web-1: endpoint 1 repeats the address 10.1.0.2 of another"},
		{reason: "Address", edit: func(w *world) { w.slice.Endpoints[0].Addresses[0] = "10.1.0.x" }, one: `because: EndpointSlice shop/web-1: endpoint 0: "10.1.0.x" is not an IP address`,
			all: `shop/web:http/TCP/IPv4: has no endpoints on any node: EndpointSlice shop/web-1: endpoint 0: "10.1.0.x" is not an IP address`},
		{reason: "Address", edit: func(w *world) { w.service.Spec.ClusterIP, w.service.Spec.ClusterIPs = "0.0.0.0", []string{"0.0.0.0"} }, to: "0.0.0.0:80",
			one: "left out: Service shop/web: cluster IP: 0.0.0.0 is not a unicast address", all: "shop/web:http: is not served: Service shop/web: cluster IP: 0.0.0.0 is not a unicast address"},
		{reason: "Reserved", edit: ingress(v1.LoadBalancerIngress{IP: "169.254.169.254"}), to: "169.254.169.254:80",
			one: "left out: Service shop/web: load-balancer ingress: 169.254.169.254 is reserved", all: "left out: Service shop/web: load-balancer ingress: 169.254.169.254 is reserved"},
		{reason: "Family", edit: func(w *world) { w.service.Spec.ExternalIPs = []string{"2001:db8::1"} }, to: "[2001:db8::1]:80",
			one: "left out: Service shop/web: externalIPs: the Service has no cluster IP of the family of 2001:db8::1 that is served"},
		{reason: "Family", edit: func(w *world) { w.families = []tracker.Family{tracker.IPv6} },
			one: "left out: Service shop/web: cluster IP 10.96.0.1: the proxy does not serve IPv4", all: "shop/web:http: is not served: Service shop/web: cluster IP 10.96.0.1: the proxy does not serve IPv4"},
		{reason: "FamilyMismatch", edit: func(w *world) { w.slice.Endpoints[0].Addresses[0] = "2001:db8::1" },
			one: "because: EndpointSlice shop/web-1: endpoint 0: 2001:db8::1 in a slice of type IPv4",
			all: "shop/web:http/TCP/IPv4: has no endpoints on any node: EndpointSlice shop/web-1: endpoint 0: 2001:db8::1 in a slice of type IPv4"},
		{reason: "FurtherAddress", edit: func(w *world) { w.slice.Endpoints[0].Addresses = []string{"10.1.0.2", "10.1.0.3"} },
			one: "left out: EndpointSlice shop/web-1: endpoint 0 has 2 addresses; only the first is used"},
		{reason: "Hostname", edit: ingress(v1.LoadBalancerIngress{Hostname: "lb.example.com"}), one: `left out: Service shop/web: load-balancer ingress "lb.example.com" has no address`},
		{reason: "ExternalIPsOff", edit: func(w *world) {
			w.service.Spec.ExternalIPs, w.flags = []string{"203.0.113.1"}, []string{"--feature-gates", "AllowServiceExternalIPs=false"}
		}, to: "203.0.113.1:80", one: "left out: Service shop/web: the proxy does not serve externalIPs, of which it has 1"},
		{reason: "SourceRange", edit: func(w *world) { w.service.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/8", "10.0.0.0/33"} },
			one: `left out: Service shop/web: loadBalancerSourceRanges: "10.0.0.0/33" is not a range of addresses`,
			all: `left out: Service shop/web: loadBalancerSourceRanges: "10.0.0.0/33" is not a range of addresses`},
		{reason: "Closed", edit: func(w *world) {
			ingress(v1.LoadBalancerIngress{IP: "203.0.113.1"})(w)
			w.service.Spec.LoadBalancerSourceRanges = []string{"10.0.0.0/33"}
		}, to: "203.0.113.1:80", one: "left out: Service shop/web: no usable IPv4 range in loadBalancerSourceRanges: the load-balancer addresses are closed to everyone",
			all: "no usable IPv4 range in loadBalancerSourceRanges: the load-balancer addresses are closed to everyone"},
		{reason: "HookWarning", edit: func(w *world) {
			w.service.Annotations = map[string]string{annotations.Balance: "best"}
			w.flags = []string{"--allow-annotations", "balance"}
		}, one: "warning: Service shop/web: ", all: "warning: Service shop/web: "},
		{reason: "LimitExceeded", edit: func(w *world) {
			w.flags = []string{"--budget", "port=1"}
			endpoint(discovery.Endpoint{})(w)
		}, one: "left out: shop/web:http/TCP/IPv4: ", all: "shop/web:http/TCP/IPv4: is incomplete: "},
		{reason: "FrontendConflict", edit: func(w *world) {
			old := w.service.DeepCopy()
			old.Name, old.CreationTimestamp, old.Spec.ClusterIP, old.Spec.ClusterIPs = "old", metav1.Unix(1, 0), "10.96.0.2", []string{"10.96.0.2"}
			old.Spec.ExternalIPs = []string{"203.0.113.1"}
			w.service.Spec.ExternalIPs, w.more = old.Spec.ExternalIPs, []*v1.Service{old}
		}, one: "left out: external IP 203.0.113.1:80 belongs to shop/old:http/TCP/IPv4", all: "shop/web:http/TCP/IPv4: external IP 203.0.113.1:80 belongs to shop/old:http/TCP/IPv4"},

		{reason: "NotReady", edit: func(w *world) { w.slice.Endpoints[0].Conditions.Ready = &no },
			one: "because: 1 of its 1 endpoint is not ready: a readiness probe fails, or a container does not run",
			all: "shop/web:http/TCP/IPv4: has no endpoints on any node: 1 of its 1 endpoint is not ready: a readiness probe fails, or a container does not run"},
		{reason: "NotReady", edit: endpoint(discovery.Endpoint{Conditions: discovery.EndpointConditions{Ready: &no}}),
			one: "not used: 1 of its 2 endpoints is not ready: a readiness probe fails, or a container does not run"},
		{reason: "Terminating", edit: endpoint(discovery.Endpoint{Conditions: discovery.EndpointConditions{Ready: &no, Serving: &yes, Terminating: &yes}}),
			one: "not used: 1 of its 2 endpoints is terminating, and others are ready"},
		{reason: "OtherNode", edit: func(w *world) {
			local, n2 := v1.ServiceInternalTrafficPolicyLocal, "n2"
			w.service.Spec.InternalTrafficPolicy, w.slice.Endpoints[0].NodeName = &local, &n2
		}, one: "not used: 1 of its 1 endpoint is on another node, and the traffic policies are Local",
			all: "shop/web:http/TCP/IPv4: has endpoints, but none this node may use: 1 of its 1 endpoint is on another node, and the traffic policies are Local"},
		{reason: "Hints", edit: func(w *world) {
			w.node = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{v1.LabelTopologyZone: "a"}}}
			w.slice.Endpoints[0].Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "a"}}}
			endpoint(discovery.Endpoint{Hints: &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: "b"}}}})(w)
		}, one: "not used: 1 of its 2 endpoints is for other nodes or zones, by its hints"},
		{reason: "Weight", edit: func(w *world) {
			w.slice.Annotations = map[string]string{annotations.Weight: "0"}
			w.flags = []string{"--allow-annotations", "weight"}
		}, one: "because: 1 of its 1 endpoint is of weight 0", all: "shop/web:http/TCP/IPv4: has no endpoints on any node: 1 of its 1 endpoint is of weight 0"},
	} {
		covered["Reason"+c.reason] = true
		w := newWorld()
		c.edit(w)
		if c.to == "" {
			c.to = "10.96.0.1:80"
		}
		one, all := w.explain(t, c.to)
		reason := reasonTexts(t)["Reason"+c.reason]
		for _, x := range []struct{ what, got, want string }{{"explain", one, c.one}, {"explain --all", all, c.all}} {
			has := strings.Contains(x.got, "("+string(reason)+")")
			if has != (x.want != "") || has && !hasLine(x.got, x.want, "("+string(reason)+")") {
				t.Errorf("%s: %s prints\n%s\nwant %q with (%s)", c.reason, x.what, x.got, x.want, reason)
			}
		}
	}
	for name := range reasonTexts(t) {
		if !covered[name] {
			t.Errorf("no case has %s", name)
		}
	}
}

// hasLine reports whether a line of text has all parts.
func hasLine(text string, parts ...string) bool {
	for line := range strings.Lines(text) {
		if !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) }) {
			return true
		}
	}
	return false
}

// reasonTexts returns the constants of tracker.Reason from the source.
func reasonTexts(t *testing.T) map[string]tracker.Reason {
	t.Helper()
	out := map[string]tracker.Reason{}
	for _, name := range []string{"endpointslice/leftout.go", "tracker/reason.go"} {
		f := must.Get(parser.ParseFile(token.NewFileSet(), "../../../../"+name, nil, 0))(t)
		ast.Inspect(f, func(x ast.Node) bool {
			if spec, ok := x.(*ast.ValueSpec); ok {
				if lit, ok := spec.Values[0].(*ast.BasicLit); ok {
					out[spec.Names[0].Name] = tracker.Reason(strings.Trim(lit.Value, `"`))
				}
			}
			return true
		})
	}
	if len(out) < 30 {
		t.Fatalf("%d reasons", len(out))
	}
	return out
}

// TestExplainPrintsOnlyWhatWasAskedFor has a Service with mistakes and a hundred others.
func TestExplainPrintsOnlyWhatWasAskedFor(t *testing.T) {
	w := newWorld()
	w.service.Spec.SessionAffinity = "clientIP"
	for i := range 100 {
		s := w.service.DeepCopy()
		s.Name, s.Spec.ClusterIP, s.Spec.ClusterIPs = fmt.Sprint("other-", i), fmt.Sprint("10.96.1.", i+1), nil
		w.more = append(w.more, s)
	}
	one, _ := w.explain(t, "10.96.0.1:80")
	if strings.Contains(one, "other-") || strings.Count(one, "clientIP") != 1 {
		t.Errorf("explain prints\n%s", one)
	}
}

// TestAnotherMistakeIsNotTheReason has a slice without the port, and with an invalid address, which
// would not matter if the port was there.
func TestAnotherMistakeIsNotTheReason(t *testing.T) {
	w := newWorld()
	name := "web"
	w.slice.Ports[0].Name = &name
	w.slice.Endpoints = append(w.slice.Endpoints, discovery.Endpoint{Addresses: []string{"10.1.0.x"}})
	one, _ := w.explain(t, "10.96.0.1:80")
	if !hasLine(one, `because: its EndpointSlices have the ports "web"/TCP, and not "http"/TCP`) ||
		!hasLine(one, `left out: EndpointSlice shop/web-1: endpoint 1: "10.1.0.x" is not an IP address (ProxyAddress)`) {
		t.Errorf("explain prints\n%s", one)
	}
}

// TestExplainIsBounded has a Service with many mistakes.
func TestExplainIsBounded(t *testing.T) {
	w := newWorld()
	for i := range 900 {
		w.service.Spec.ExternalIPs = append(w.service.Spec.ExternalIPs, fmt.Sprint("x", i))
	}
	one, all := w.explain(t, "10.96.0.1:80")
	if n := strings.Count(one, "\n"); n > 30 || !strings.Contains(one, "and 880 more\n") {
		t.Errorf("explain prints %d lines:\n%s", n, one)
	}
	if len(all) > 2000 || !strings.Contains(all, "; and 892 more\n") {
		t.Errorf("explain --all prints\n%s", all)
	}
}
