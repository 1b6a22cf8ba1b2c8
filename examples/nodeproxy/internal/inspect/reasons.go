package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/go-proxier/proxier/endpointslice"
	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// finding is a part that is left out of an object, or the object.
type finding struct {
	object manifests.Ref
	tracker.LeftOut
}

// String returns the object, what is left out and the reason.
func (f finding) String() string { return fmt.Sprintf("%v: %v (%s)", f.object, f.Err, f.Reason) }

// label returns the word before a finding.
func (f finding) label() string {
	if f.Reason == tracker.ReasonHookWarning {
		return "warning"
	}
	return "left out"
}

func nameOfObject(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// findings returns what is left out of an object.
func findings(w *objects.World, kind manifests.Kind, name types.NamespacedName) (out []finding) {
	for _, l := range w.LeftOut(string(kind), name) {
		out = append(out, finding{manifests.Ref{Kind: kind, NamespacedName: name}, l})
	}
	return out
}

// those returns the findings for which f returns true.
func those(all []finding, f func(finding) bool) []finding {
	return slices.DeleteFunc(slices.Clone(all), func(x finding) bool { return !f(x) })
}

// joined returns the first findings as one text.
func joined(all []finding) string {
	var out []string
	for _, f := range all {
		out = append(out, f.String())
	}
	return strings.Join(few(out, 8), "; ")
}

// few returns the first texts of a list, and how many more there are.
func few(list []string, most int) []string {
	if n := len(list) - most; n > 0 {
		return append(list[:most:most], fmt.Sprintf("and %d more", n))
	}
	return list
}

// whyEmpty returns why no endpoint of a Service port gets connections in an address family, and the
// findings that are the reason, if any. The port is served as o.
func whyEmpty(w *objects.World, s *v1.Service, o *ruleset.Port) (text string, causes []finding) {
	if len(o.Endpoints) != 0 {
		return strings.Join(notUsed(o, w.Tracker.Node()), ", "), nil
	}
	list := w.KeptSlices(o.Key.NamespacedName)
	for _, slice := range list {
		if ip := slice.AddressType == discovery.AddressTypeIPv4 || slice.AddressType == discovery.AddressTypeIPv6; ip && string(slice.AddressType) != o.Key.Family.String() {
			continue
		}
		hasPort := slices.ContainsFunc(slice.Ports, func(p discovery.EndpointPort) bool { return p.Name != nil && *p.Name == o.Key.Port })
		causes = append(causes, those(findings(w, manifests.EndpointSlice, nameOfObject(slice)), func(f finding) bool {
			switch f.Reason {
			case tracker.ReasonPortName:
				return true
			case tracker.ReasonFurtherAddress, tracker.ReasonDuplicate, tracker.ReasonHookWarning, tracker.ReasonInvalid:
				return f.Whole
			}
			return f.Whole || hasPort && (f.Port == nil || *f.Port == o.Key.Port)
		})...)
	}
	if len(causes) != 0 {
		return joined(causes), causes
	}
	return absent(s, list, o.Key), nil
}

// notUsed returns, for each reason, how many endpoints of a Service port get no connections.
func notUsed(o *ruleset.Port, node tracker.NodeInfo) (out []string) {
	number, running := map[tracker.Reason]int{}, false
	for _, e := range o.Endpoints {
		r := o.Selection.Excludes(o.Spec, e, node)
		number[r]++
		running = running || r == tracker.ReasonNotReady && !e.Terminating
	}
	delete(number, "")
	why := map[tracker.Reason]string{
		tracker.ReasonNotReady:    "terminating",
		tracker.ReasonTerminating: "terminating, and others are ready",
		tracker.ReasonOtherNode:   "on another node, and the traffic policies are Local",
		tracker.ReasonHints:       "for other nodes or zones, by its hints",
		tracker.ReasonWeight:      "of weight 0",
	}
	if running {
		why[tracker.ReasonNotReady] = "not ready: a readiness probe fails, or a container does not run"
	}
	for _, r := range slices.Sorted(maps.Keys(number)) {
		verb := "are"
		if number[r] == 1 {
			verb = "is"
		}
		out = append(out, fmt.Sprintf("%d of its %s %s %s (%s)", number[r], count(len(o.Endpoints), "endpoint"), verb, why[r], r))
	}
	return out
}

// absent returns why a Service port has no endpoints although nothing is left out.
func absent(s *v1.Service, list []*discovery.EndpointSlice, key tracker.Key) string {
	selects := len(s.Spec.Selector) != 0
	endpoints, others, have := 0, 0, map[string]bool{}
	for _, slice := range list {
		if string(slice.AddressType) != key.Family.String() {
			others += len(slice.Endpoints)
			continue
		}
		endpoints += len(slice.Endpoints)
		for _, p := range slice.Ports {
			if len(slice.Endpoints) != 0 && p.Name != nil {
				have[fmt.Sprintf("%q/%s", *p.Name, ptr.Deref(p.Protocol, v1.ProtocolTCP))] = true
			}
		}
	}
	switch {
	case len(list) == 0 && !selects:
		return "it has no selector, and no EndpointSlice that another program would have to write"
	case len(list) == 0:
		return "it has no EndpointSlice: the controller has not made one yet, or it was deleted"
	case endpoints == 0 && others != 0:
		return fmt.Sprintf("its %s are of the other address family: the pods have no %v address", count(others, "endpoint"), key.Family)
	case endpoints == 0 && selects:
		return fmt.Sprintf("its selector %s matches no pod with an address", labels.Set(s.Spec.Selector))
	case endpoints == 0:
		return "its EndpointSlices have no endpoints"
	}
	for _, p := range s.Spec.Ports {
		if p.Name == key.Port && p.TargetPort.StrVal != "" && selects {
			return fmt.Sprintf("no container port of its %s is named %q, the port's targetPort", count(endpoints, "endpoint"), p.TargetPort.StrVal)
		}
	}
	if len(have) == 0 {
		return fmt.Sprintf("the EndpointSlices of its %s have no ports", count(endpoints, "endpoint"))
	}
	return fmt.Sprintf("its EndpointSlices have the ports %s, and not %q/%s", strings.Join(slices.Sorted(maps.Keys(have)), ", "), key.Port, key.Protocol)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// errCannotWork ends explain --all if it found a Service that cannot work.
var errCannotWork = errors.New("some Services cannot work")

// taken describes the frontends that a Service asks for and another Service owns, each with the
// reason.
func taken(snapshot *ruleset.Snapshot, s *ruleset.Port) (out []string) {
	check := func(kind ruleset.Kind, port uint16, addresses ...netip.Addr) {
		for _, a := range addresses {
			at := netip.AddrPortFrom(a, port)
			owner, _ := snapshot.Lookup(at, s.Key.Protocol)
			if owner == nil || owner.Key == s.Key {
				continue
			}
			where := at.String()
			if kind == ruleset.KindNodePort {
				where = fmt.Sprint(port)
			}
			out = append(out, fmt.Sprintf("%v %s belongs to %v (%s)", kind, where, owner.Key, tracker.ReasonFrontendConflict))
		}
	}
	p, every := s.Spec, netip.IPv4Unspecified()
	if s.Key.Family == tracker.IPv6 {
		every = netip.IPv6Unspecified()
	}
	check(ruleset.KindClusterIP, p.Port, p.ClusterIP)
	check(ruleset.KindExternalIP, p.Port, p.ExternalIPs...)
	check(ruleset.KindLoadBalancerIP, p.Port, p.LoadBalancerIPs...)
	if p.NodePort != 0 {
		check(ruleset.KindNodePort, p.NodePort, every)
	}
	return out
}

// servicesAt returns the Services that name the destination of a packet, whether they are served there
// or not.
func servicesAt(w *objects.World, to netip.AddrPort, toNode bool) (out []types.NamespacedName) {
	for _, s := range w.KeptServices() {
		texts := append(append([]string{s.Spec.ClusterIP}, s.Spec.ClusterIPs...), s.Spec.ExternalIPs...)
		for _, in := range s.Status.LoadBalancer.Ingress {
			texts = append(texts, in.IP)
		}
		if slices.ContainsFunc(texts, func(text string) bool {
			a, err := endpointslice.ParseAddr(text)
			return err == nil && a == to.Addr().Unmap()
		}) || toNode && slices.ContainsFunc(s.Spec.Ports, func(p v1.ServicePort) bool { return p.NodePort == int32(to.Port()) }) {
			out = append(out, nameOfObject(s))
		}
	}
	return out
}

// writeFindings writes what is left out of the Services that a packet is for, and what is wrong with
// their manifests. why has what was written already.
func writeFindings(out io.Writer, w *objects.World, snapshot *ruleset.Snapshot, p ruleset.Packet, v ruleset.Verdict, why []finding) {
	var lines []string
	names := servicesAt(w, p.To, slices.Contains(p.NodeAddresses, p.To.Addr()))
	if s := v.Port; s != nil {
		names = []types.NamespacedName{s.Key.NamespacedName}
		if s.Selection.HasAny {
			for _, text := range notUsed(s, snapshot.Node.Info) {
				lines = append(lines, "not used: "+text)
			}
		}
		for _, text := range taken(snapshot, s) {
			lines = append(lines, "left out: "+text)
		}
		if s.LeftOut != nil {
			lines = append(lines, fmt.Sprintf("left out: %v: %s (%s)", s.Key, s.LeftOut.Text, tracker.ReasonLimitExceeded))
		}
	}
	asked := map[manifests.Ref]bool{}
	about := func(kind manifests.Kind, name types.NamespacedName) {
		asked[manifests.Ref{Kind: kind, NamespacedName: name}] = true
		for _, f := range findings(w, kind, name) {
			if !slices.ContainsFunc(why, func(o finding) bool { return o.String() == f.String() }) {
				lines = append(lines, fmt.Sprintf("%s: %v", f.label(), f))
			}
		}
	}
	for _, n := range names {
		about(manifests.Service, n)
		for _, s := range w.KeptSlices(n) {
			about(manifests.EndpointSlice, nameOfObject(s))
		}
	}
	for _, p := range w.Problems() {
		// A part that cannot be read may have been what was asked for.
		if asked[p.Ref] || v.Port == nil && p.Ref.Name == "" {
			lines = append(lines, fmt.Sprintf("manifests: %v", p))
		}
	}
	for _, line := range few(lines, 20) {
		printLine(out, "%s", line)
	}
}

// explainAll prints each Service port that cannot work or is incomplete, each frontend that a
// Service port asks for and another Service owns, and what else is left out of objects that ask for
// it, each with the reason.
func explainAll(out io.Writer, w *objects.World) error {
	snapshot := w.Engine.Snapshot()
	served := map[tracker.Key]*ruleset.Port{}
	for _, s := range slices.Concat(snapshot.Ports, snapshot.Refused) {
		served[s.Key] = s
	}
	services, ports, broken, lost, incomplete, left := 0, 0, 0, 0, 0, 0
	said := map[string]bool{}
	say := func(causes []finding, format string, args ...any) {
		broken++
		for _, f := range causes {
			said[f.String()] = true
		}
		printLine(out, format, args...)
	}
	// others prints the findings about an object that are not printed yet, and not expected.
	others := func(all []finding) {
		for _, warning := range []bool{false, true} {
			some := those(all, func(f finding) bool {
				return !f.Expected && !said[f.String()] && warning == (f.Reason == tracker.ReasonHookWarning)
			})
			if len(some) != 0 {
				left += len(some)
				printLine(out, "%s: %s", some[0].label(), joined(some))
			}
		}
	}
	for _, s := range w.KeptServices() {
		name := nameOfObject(s)
		about := findings(w, manifests.Service, name)
		whole := those(about, func(f finding) bool { return f.Whole })
		if len(whole) != 0 && whole[0].Expected && whole[0].Reason != tracker.ReasonNoClusterIP && whole[0].Reason != tracker.ReasonNoPorts {
			continue
		}
		services++
		if len(whole) != 0 {
			say(whole, "%v: is not served: %s", name, joined(whole))
			continue
		}
		for _, p := range s.Spec.Ports {
			key := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: name, Port: p.Name, Protocol: cmp.Or(p.Protocol, v1.ProtocolTCP)}}
			found := false
			for _, key.Family = range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				o := served[key]
				if o == nil {
					continue
				}
				found = true
				ports++
				for _, what := range taken(snapshot, o) {
					lost++
					printLine(out, "%v: %s", key, what)
				}
				if o.LeftOut != nil {
					incomplete++
					printLine(out, "%v: is incomplete: %s (%s)", key, o.LeftOut.Text, tracker.ReasonLimitExceeded)
				}
				switch sel := o.Selection; {
				case len(sel.Reachable) == 0 && !sel.HasAny:
					why, causes := whyEmpty(w, s, o)
					say(causes, "%v: has no endpoints on any node: %s", key, why)
				case len(sel.Reachable) == 0:
					say(nil, "%v: has endpoints, but none this node may use: %s", key, strings.Join(notUsed(o, snapshot.Node.Info), ", "))
				}
			}
			if !found {
				causes := those(about, func(f finding) bool { return f.Port != nil && *f.Port == p.Name })
				if len(causes) == 0 {
					causes = those(about, func(f finding) bool { return f.Port == nil })
				}
				say(causes, "%v: is not served: %s", key.ServicePortName, joined(causes))
			}
		}
		others(about)
	}
	for _, s := range w.KeptSlices(types.NamespacedName{}) {
		others(findings(w, manifests.EndpointSlice, nameOfObject(s)))
	}
	for _, p := range w.Problems() {
		printLine(out, "manifests: %v", p)
	}
	result := "all have endpoints"
	if broken != 0 {
		result = fmt.Sprintf("%d cannot work", broken)
	}
	for _, also := range []struct {
		n    int
		what string
		how  string
	}{{lost, "frontend", "lost to other Services"}, {incomplete, "port", "incomplete by a bound"}, {left, "part", "left out or warned about"}} {
		if also.n != 0 {
			result += fmt.Sprintf(", %s %s", count(also.n, also.what), also.how)
		}
	}
	printLine(out, "%s, %s: %s", count(services, "Service"), count(ports, "port"), result)
	if broken+lost+incomplete+left == 0 {
		return nil
	}
	return errCannotWork
}
