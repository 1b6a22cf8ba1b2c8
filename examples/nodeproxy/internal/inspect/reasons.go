package inspect

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/objects"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// whyEmpty returns why no endpoint of a Service port gets connections in an address family,
// according to its EndpointSlices.
func whyEmpty(s *v1.Service, list []*discovery.EndpointSlice, key tracker.Key) string {
	selector := ""
	if len(s.Spec.Selector) != 0 {
		selector = labels.Set(s.Spec.Selector).String()
	}
	if len(list) == 0 {
		if selector == "" {
			return "it has no selector, and no EndpointSlice that another program would have to write"
		}
		return "it has no EndpointSlice: the controller has not made one yet, or it was deleted"
	}
	// endpoints counts addresses of the family; named those in slices with the port.
	var endpoints, named, ready, terminating, others int
	have := map[string]bool{}
	for _, slice := range list {
		if string(slice.AddressType) != key.Family.String() {
			others += len(slice.Endpoints)
			continue
		}
		endpoints += len(slice.Endpoints)
		port := false
		for _, p := range slice.Ports {
			name, protocol := "", v1.ProtocolTCP
			if p.Name != nil {
				name = *p.Name
			}
			if p.Protocol != nil {
				protocol = *p.Protocol
			}
			if len(slice.Endpoints) != 0 {
				have[fmt.Sprintf("%q/%s", name, protocol)] = true
			}
			port = port || name == key.Port && protocol == key.Protocol && p.Port != nil
		}
		if !port {
			continue
		}
		named += len(slice.Endpoints)
		for _, e := range slice.Endpoints {
			switch c := e.Conditions; {
			case c.Terminating != nil && *c.Terminating:
				terminating++
			case c.Ready == nil || *c.Ready:
				ready++
			}
		}
	}
	switch {
	case endpoints == 0 && others != 0:
		return fmt.Sprintf("its %s are of the other address family: the pods have no %v address", count(others, "endpoint"), key.Family)
	case endpoints == 0 && selector != "":
		return fmt.Sprintf("its selector %s matches no pod with an address", selector)
	case endpoints == 0:
		return "its EndpointSlices have no endpoints"
	case named == 0:
		return noPort(s, key, endpoints, slices.Sorted(maps.Keys(have)))
	case ready == 0 && terminating == named:
		return fmt.Sprintf("all %s terminate", count(named, "endpoint"))
	case ready == 0:
		return fmt.Sprintf("none of its %s is ready: a readiness probe fails, or a container does not run", count(named, "endpoint"))
	}
	return fmt.Sprintf("%d of its %s are ready, but none can be used: the addresses are invalid, or the weights are 0", ready, count(named, "endpoint"))
}

// noPort returns why endpoints lack a Service port.
func noPort(s *v1.Service, key tracker.Key, endpoints int, have []string) string {
	for _, p := range s.Spec.Ports {
		if p.Name == key.Port && p.TargetPort.StrVal != "" && len(s.Spec.Selector) != 0 {
			return fmt.Sprintf("no container port of its %s is named %q, the port's targetPort", count(endpoints, "endpoint"), p.TargetPort.StrVal)
		}
	}
	if len(have) == 0 {
		return fmt.Sprintf("the EndpointSlices of its %s have no ports", count(endpoints, "endpoint"))
	}
	return fmt.Sprintf("its EndpointSlices have the ports %s, and not %q/%s", strings.Join(have, ", "), key.Port, key.Protocol)
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// serviceProxyName is the label of Services that another proxy serves.
const serviceProxyName = "service.kubernetes.io/service-proxy-name"

// errCannotWork ends explain --all if it found a Service that cannot work.
var errCannotWork = errors.New("some Services cannot work")

// taken describes the frontends that a Service asks for and another Service owns.
func taken(snapshot *ruleset.Snapshot, s *ruleset.Service) (out []string) {
	check := func(kind ruleset.Kind, a netip.Addr, port uint16) {
		owner, f := snapshot.Lookup(netip.AddrPortFrom(a, port), s.Key.Protocol)
		if owner == nil || owner.Key == s.Key || f.IsRange() != s.Port.IsRange() {
			return
		}
		at := netip.AddrPortFrom(a, port).String()
		if kind == ruleset.KindNodePort {
			at = fmt.Sprint(port)
		}
		out = append(out, fmt.Sprintf("%v %s belongs to %v", kind, at, owner.Key))
	}
	p := s.Port
	check(ruleset.KindClusterIP, p.ClusterIP, p.Port)
	for _, a := range p.ExternalIPs {
		check(ruleset.KindExternalIP, a, p.Port)
	}
	for _, a := range p.LoadBalancerIPs {
		check(ruleset.KindLoadBalancerIP, a, p.Port)
	}
	if every := netip.IPv4Unspecified(); p.NodePort != 0 {
		if s.Key.Family == tracker.IPv6 {
			every = netip.IPv6Unspecified()
		}
		check(ruleset.KindNodePort, every, p.NodePort)
	}
	return out
}

// explainAll prints each Service port that cannot work or is incomplete, with the reason, and each
// frontend that a Service port asks for and another Service owns.
func explainAll(out io.Writer, w *objects.World) error {
	snapshot := w.Engine.Snapshot()
	served := map[tracker.Key]*ruleset.Service{}
	for _, list := range [][]*ruleset.Service{snapshot.Services, snapshot.Refused} {
		for _, s := range list {
			served[s.Key] = s
		}
	}
	services, ports, broken, lost, incomplete := 0, 0, 0, 0, 0
	say := func(format string, args ...any) {
		broken++
		printLine(out, format, args...)
	}
	for _, s := range w.KeptServices() {
		if _, other := s.Labels[serviceProxyName]; other || s.Spec.Type == v1.ServiceTypeExternalName || s.Spec.ClusterIP == v1.ClusterIPNone {
			continue
		}
		services++
		name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
		for _, p := range s.Spec.Ports {
			key := tracker.Key{}
			key.Namespace, key.Name, key.Port, key.Protocol = name.Namespace, name.Name, p.Name, p.Protocol
			if key.Protocol == "" {
				key.Protocol = v1.ProtocolTCP
			}
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
					printLine(out, "%v: is incomplete: %s", key, o.LeftOut.Text)
				}
				switch sel := o.Selection; {
				case len(sel.Reachable) == 0 && !sel.HasAny:
					say("%v: has no endpoints on any node: %s", key, whyEmpty(s, w.KeptSlices(name), key))
				case len(sel.Reachable) == 0:
					say("%v: has endpoints, but none this node may use: a traffic policy is Local", key)
				}
			}
			if !found {
				say("%v: is not served: it has no valid cluster IP and port; the log of the agent and an Event name the reason", key.ServicePortName)
			}
		}
	}
	result := "all have endpoints"
	if broken != 0 {
		result = fmt.Sprintf("%d cannot work", broken)
	}
	if lost != 0 {
		result += fmt.Sprintf(", %s lost to other Services", count(lost, "frontend"))
	}
	if incomplete != 0 {
		result += fmt.Sprintf(", %s incomplete by a bound", count(incomplete, "port"))
	}
	fmt.Fprintf(out, "%s, %s: %s\n", count(services, "Service"), count(ports, "port"), result)
	if broken+lost+incomplete == 0 {
		return nil
	}
	return errCannotWork
}
