package manifests

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/go-proxier/proxier/endpointslice"
)

// review collects what an API server would do with an object. It covers the fields that a node
// agent reads.
type review struct {
	refused, set []string
	// lost is what is wrong with an object that an API server accepts.
	lost string
}

// reviewed returns an error that names what an API server would refuse about an object, after
// setDefaults, and what it would set, or nil if there is nothing. It reports whether it would refuse it.
func reviewed(o metav1.Object) (refused bool, what error) {
	var r review
	ns := o.GetNamespace()
	r.refuse(ns != "" && len(validation.IsDNS1123Label(ns)) != 0, "namespace %.60q is no DNS label", ns)
	valid, form := validation.IsDNS1123Subdomain, "name in the DNS"
	if _, ok := o.(*v1.Service); ok {
		// It may begin with a digit (KEP-5311).
		valid, form = validation.IsDNS1123Label, "DNS label"
	}
	r.refuse(len(valid(o.GetName())) != 0, "name %.60q is no %s", o.GetName(), form)
	switch o := o.(type) {
	case *v1.Service:
		r.service(o)
	case *discovery.EndpointSlice:
		r.slice(o)
	case *networking.ServiceCIDR:
		for _, c := range o.Spec.CIDRs {
			_, err := netip.ParsePrefix(c)
			r.refuse(err != nil, "cidr %.60q is no range of addresses", c)
		}
	}
	var out []string
	if r.refused != nil {
		out = append(out, "an API server would refuse it: "+some(r.refused, "; "))
	}
	if r.set != nil {
		out = append(out, "an API server would set what it lacks: "+some(r.set, ", "))
	}
	if r.lost != "" {
		out = append(out, r.lost)
	}
	if out == nil {
		return false, nil
	}
	return r.refused != nil, errors.New(strings.Join(out, "; "))
}

// some joins the first few parts.
func some(parts []string, with string) string {
	const most = 4
	if n := len(parts) - most; n > 0 {
		return fmt.Sprintf("%s (and %d more)", strings.Join(parts[:most], with), n)
	}
	return strings.Join(parts, with)
}

// refuse names what is bad, if it is.
func (r *review) refuse(bad bool, format string, args ...any) {
	if bad {
		r.refused = append(r.refused, fmt.Sprintf(format, args...))
	}
}

func (r *review) sets(field string) { r.set = append(r.set, field) }

// known refuses a value that the API does not define. values lists those that it does.
func known[T ~string](r *review, field string, value T, values ...T) {
	r.refuse(!slices.Contains(values, value), "%s %.60q is unknown", field, value)
}

func (r *review) service(s *v1.Service) {
	spec := &s.Spec
	known(r, "type", spec.Type, "", v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer, v1.ServiceTypeExternalName)
	known(r, "sessionAffinity", spec.SessionAffinity, "", v1.ServiceAffinityNone, v1.ServiceAffinityClientIP)
	known(r, "externalTrafficPolicy", spec.ExternalTrafficPolicy, "", v1.ServiceExternalTrafficPolicyCluster, v1.ServiceExternalTrafficPolicyLocal)
	if p := spec.InternalTrafficPolicy; p != nil {
		known(r, "internalTrafficPolicy", *p, v1.ServiceInternalTrafficPolicyCluster, v1.ServiceInternalTrafficPolicyLocal)
	}
	if spec.SessionAffinity == v1.ServiceAffinityClientIP {
		seconds := *spec.SessionAffinityConfig.ClientIP.TimeoutSeconds
		r.refuse(seconds < 1 || seconds > 86400, "timeoutSeconds %d is not between 1 and 86400", seconds)
	}
	if spec.Type == v1.ServiceTypeExternalName {
		return
	}
	r.clusterIPs(spec)
	headless := spec.ClusterIP == v1.ClusterIPNone
	r.refuse(len(spec.Ports) == 0 && !headless, "it has no ports")
	allocates := spec.Type == v1.ServiceTypeNodePort ||
		spec.Type == v1.ServiceTypeLoadBalancer && (spec.AllocateLoadBalancerNodePorts == nil || *spec.AllocateLoadBalancerNodePorts)
	names, numbers := map[string]bool{}, map[string]bool{}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		at := fmt.Sprintf("port %.60q: ", p.Name)
		r.port(at, p.Name, p.Protocol)
		r.refuse(p.Port < 1 || p.Port > 65535, "%sport %d is out of range", at, p.Port)
		number := fmt.Sprint(p.Port, p.Protocol)
		r.refuse(numbers[number] || names[p.Name] || p.Name == "" && len(spec.Ports) > 1, "%sits name or number is that of another port, or it has no name", at)
		names[p.Name], numbers[number] = true, true
		if p.NodePort == 0 && allocates {
			r.sets(at + "nodePort")
		}
		r.refuse(p.NodePort != 0 && spec.Type != v1.ServiceTypeNodePort && spec.Type != v1.ServiceTypeLoadBalancer, "%sa Service of type %.60q has no nodePort", at, spec.Type)
		r.refuse(p.NodePort < 0 || p.NodePort > 65535, "%snodePort %d is out of range", at, p.NodePort)
	}
	if spec.Type == v1.ServiceTypeLoadBalancer && spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal && spec.HealthCheckNodePort == 0 {
		r.sets("healthCheckNodePort")
	}
	for _, text := range spec.ExternalIPs {
		r.address("externalIP", text)
	}
	for _, text := range spec.LoadBalancerSourceRanges {
		_, err := netip.ParsePrefix(strings.TrimSpace(text))
		r.refuse(err != nil, "loadBalancerSourceRange %.60q is no range of addresses", text)
	}
}

func (r *review) clusterIPs(spec *v1.ServiceSpec) {
	switch all := spec.ClusterIPs; {
	case spec.ClusterIP == "" && len(all) == 0:
		r.sets("clusterIP")
	case spec.ClusterIP == "":
		r.refuse(true, "it has clusterIPs and no clusterIP")
	case spec.ClusterIP == v1.ClusterIPNone:
		r.refuse(spec.Type == v1.ServiceTypeNodePort || spec.Type == v1.ServiceTypeLoadBalancer, "a Service of type %s has a clusterIP other than None", spec.Type)
	case len(all) > 0 && all[0] != spec.ClusterIP:
		r.refuse(true, "clusterIP %.60q is not the first of the clusterIPs", spec.ClusterIP)
	default:
		for _, text := range append([]string{spec.ClusterIP}, all[min(1, len(all)):]...) {
			a, err := endpointslice.ParseAddr(text)
			r.refuse(err != nil || !endpointslice.IsUnicast(a), "clusterIP %.60q is no address of a Service", text)
		}
		if len(all) > 1 && len(spec.IPFamilies) < len(all) {
			r.sets("ipFamilies")
		}
	}
}

// port reviews a port of a Service or an EndpointSlice. An API server takes any number in the
// latter.
func (r *review) port(at, name string, protocol v1.Protocol) {
	r.refuse(name != "" && len(validation.IsDNS1123Label(name)) != 0, "%sits name is no DNS label", at)
	known(r, at+"protocol", protocol, v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP)
}

// address refuses an address at which other hosts cannot reach a Service or an endpoint.
func (r *review) address(what, text string) (a netip.Addr) {
	a, err := endpointslice.ParseAddr(text)
	r.refuse(err != nil, "%s %.60q is no IP address", what, text)
	r.refuse(err == nil && (!endpointslice.IsUnicast(a) || a.IsLoopback() || a.IsLinkLocalUnicast()), "%s %s is not that of a host in the network", what, a)
	return a
}

func (r *review) slice(s *discovery.EndpointSlice) {
	known(r, "addressType", s.AddressType, discovery.AddressTypeIPv4, discovery.AddressTypeIPv6, discovery.AddressTypeFQDN)
	names := map[string]bool{}
	for i := range s.Ports {
		p := &s.Ports[i]
		at := fmt.Sprintf("port %.60q: ", *p.Name)
		r.port(at, *p.Name, *p.Protocol)
		r.refuse(names[*p.Name], "%sits name is that of another port", at)
		names[*p.Name] = true
	}
	r.refuse(len(s.Endpoints) > 1000, "it has %d endpoints, more than 1000", len(s.Endpoints))
	for i := range s.Endpoints {
		at := fmt.Sprintf("endpoint %d: ", i)
		r.refuse(len(s.Endpoints[i].Addresses) == 0, "%sit has no address", at)
		for _, text := range s.Endpoints[i].Addresses {
			if s.AddressType != discovery.AddressTypeIPv4 && s.AddressType != discovery.AddressTypeIPv6 {
				break
			}
			a := r.address(at+"address", text)
			r.refuse(a.IsValid() && a.Is4() != (s.AddressType == discovery.AddressTypeIPv4), "%saddress %s is not of type %s", at, a, s.AddressType)
		}
	}
	if s.Labels[discovery.LabelServiceName] == "" {
		r.lost = "it belongs to no Service, because it has no label " + discovery.LabelServiceName
	}
}
