package conformance

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/tracker"
)

const namespace = "conformance"

func parseWords(text string) (map[string]string, error) {
	out := map[string]string{}
	for word := range strings.FieldsSeq(text) {
		key, value, _ := strings.Cut(word, "=")
		if value == "" {
			return nil, fmt.Errorf("%q is not of the form KEY=VALUE", word)
		}
		out[key] = value
	}
	return out, nil
}

func oneOf[T ~string](value string, choices ...T) (T, error) {
	if !slices.Contains(choices, T(value)) {
		return "", fmt.Errorf("%q must be one of %q", value, choices)
	}
	return T(value), nil
}

func yes(value string) (bool, error) {
	value, err := oneOf(value, "no", "yes")
	return value == "yes", err
}

// number returns a number of up to 65535.
func number(text string) (int, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("%q is no number of up to 65535", text)
	}
	return int(n), nil
}

// list returns the parts of a value between commas, and nothing for "none" or "".
func list(value string) []string {
	if value == "none" || value == "" {
		return nil
	}
	return strings.Split(value, ",")
}

func parsePrefixes(value string) (out []netip.Prefix, err error) {
	for _, text := range list(value) {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("%q is no CIDR", text)
		}
		out = append(out, p)
	}
	return out, nil
}

// addresses returns the named addresses of a list in all families. A number alone stands for the
// address of the kind.
func addresses(kind, value string, families []tracker.Family) (out []string, err error) {
	for _, f := range families {
		for _, name := range list(value) {
			if word, _ := numberOf(name); word == "" {
				name = kind + name
			}
			a, ok := named(name, f)
			if !ok {
				return nil, fmt.Errorf("there is no address %q", name)
			}
			out = append(out, a.String())
		}
	}
	return out, nil
}

func sliceName(service string, f tracker.Family) string { return fmt.Sprintf("%s-%d", service, f) }

func objects(name string, words map[string]string, families []tracker.Family) (*v1.Service, []*discovery.EndpointSlice, error) {
	o := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: v1.ServiceSpec{Type: v1.ServiceTypeClusterIP}}
	for _, f := range families {
		o.Spec.IPFamilies = append(o.Spec.IPFamilies, v1.IPFamily(f.String()))
	}
	if words["cluster"] == "" {
		return nil, nil, fmt.Errorf("the Service %q needs cluster=NUMBER", name)
	}
	only := families
	var mode *v1.LoadBalancerIPMode
	for _, key := range slices.Sorted(maps.Keys(words)) {
		var err error
		var n int
		switch value := words[key]; key {
		case "cluster":
			o.Spec.ClusterIPs, err = addresses(key, value, families)
		case "type":
			o.Spec.Type, err = oneOf(value, v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer, v1.ServiceTypeExternalName)
		case "external":
			o.Spec.ExternalIPs, err = addresses(key, value, families)
		case "lb":
			var ips []string
			ips, err = addresses(key, value, families)
			for _, ip := range ips {
				o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: ip})
			}
		case "lbMode":
			var m v1.LoadBalancerIPMode
			m, err = oneOf(value, v1.LoadBalancerIPModeVIP, v1.LoadBalancerIPModeProxy)
			mode = &m
		case "created":
			n, err = number(value)
			o.CreationTimestamp = metav1.Unix(int64(n), 0)
		case "sources":
			o.Spec.LoadBalancerSourceRanges = list(strings.ReplaceAll(value, "_", " "))
		case "internalPolicy":
			var p v1.ServiceInternalTrafficPolicy
			p, err = oneOf(value, v1.ServiceInternalTrafficPolicyCluster, v1.ServiceInternalTrafficPolicyLocal)
			o.Spec.InternalTrafficPolicy = &p
		case "externalPolicy":
			o.Spec.ExternalTrafficPolicy, err = oneOf(value, v1.ServiceExternalTrafficPolicyCluster, v1.ServiceExternalTrafficPolicyLocal)
		case "preferLocal":
			var prefer bool
			if prefer, err = yes(value); prefer {
				worldgen.SetPreferLocal(o)
			}
		case "affinity":
			if n, err = number(value); n != 0 {
				seconds := int32(n)
				o.Spec.SessionAffinity = v1.ServiceAffinityClientIP
				o.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
			}
		case "hash":
			hashes := []string{"none", "source", "source-and-port"}
			_, err = oneOf(value, hashes...)
			worldgen.SetHash(o, tracker.Hash(max(0, slices.Index(hashes, value))))
		case "endpointsIn":
			only = []tracker.Family{tracker.IPv4}
			if value, err = oneOf(value, "IPv4", "IPv6"); value == "IPv6" {
				only = []tracker.Family{tracker.IPv6}
			}
		case "ports", "endpoints":
		default:
			err = fmt.Errorf("a Service has no %q", key)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	o.Spec.ClusterIP = o.Spec.ClusterIPs[0]
	for i := range o.Status.LoadBalancer.Ingress {
		o.Status.LoadBalancer.Ingress[i].IPMode = mode
	}
	var ports []discovery.EndpointPort
	for _, text := range list(cmp.Or(words["ports"], "80")) {
		if err := addPort(o, &ports, text); err != nil {
			return nil, nil, err
		}
	}
	var slices_ []*discovery.EndpointSlice
	for _, f := range families {
		s := &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: sliceName(name, f), Labels: map[string]string{discovery.LabelServiceName: name},
			},
			AddressType: discovery.AddressType(f.String()), Ports: ports,
		}
		if slices.Contains(only, f) {
			if err := addEndpoints(s, f, words["endpoints"]); err != nil {
				return nil, nil, err
			}
		}
		slices_ = append(slices_, s)
	}
	return o, slices_, nil
}

var portForm = regexp.MustCompile(`^(?:([a-z0-9-]+)@)?(\d+)(?::(\d+))?(?:>(\d+))?(?:/(TCP|UDP|SCTP))?$`)

// addPort adds a port, or without a protocol one for TCP and one for UDP.
func addPort(o *v1.Service, ports *[]discovery.EndpointPort, text string) error {
	m := portForm.FindStringSubmatch(text)
	if m == nil {
		return fmt.Errorf("a port has the form [NAME@]PORT[:NODEPORT][>TARGET][/PROTOCOL], not %q", text)
	}
	var numbers [3]int32
	for i := range numbers {
		n, err := number("0" + m[2+i])
		if err != nil {
			return err
		}
		numbers[i] = int32(n)
	}
	target := cmp.Or(numbers[2], podPort)
	add := func(name string, p v1.Protocol) {
		o.Spec.Ports = append(o.Spec.Ports, v1.ServicePort{
			Name: name, Protocol: p, Port: numbers[0], NodePort: numbers[1], TargetPort: intstr.FromInt32(target),
		})
		*ports = append(*ports, discovery.EndpointPort{Name: &name, Protocol: &p, Port: &target})
	}
	if m[5] != "" {
		add(m[1], v1.Protocol(m[5]))
		return nil
	}
	add(strings.TrimPrefix(m[1]+"-tcp", "-"), tcp)
	add(strings.TrimPrefix(m[1]+"-udp", "-"), udp)
	return nil
}

// addEndpoints adds the endpoints of a list of POD[/CONDITION...]. The last item of a pod counts, and
// -POD removes one.
func addEndpoints(s *discovery.EndpointSlice, f tracker.Family, value string) error {
	var pods []string
	items := map[string][]string{}
	for _, item := range list(value) {
		words := strings.Split(item, "/")
		pod := strings.TrimPrefix(words[0], "-")
		if kind, n := numberOf(pod); kind != "pod" && kind != remoteName || n == 0 {
			return fmt.Errorf("there is no pod %q", pod)
		}
		pods = slices.DeleteFunc(pods, func(p string) bool { return p == pod })
		if pod == words[0] {
			pods, items[pod] = append(pods, pod), words[1:]
		}
	}
	for _, pod := range pods {
		node, ip := nodeOf(pod), address(pod, f).String()
		ready, serving, terminating := true, false, false
		hints := &discovery.EndpointHints{}
		for _, word := range items[pod] {
			switch key, value, _ := strings.Cut(word, "="); key {
			case "unready":
				ready = false
			case "serving":
				serving = true
			case "terminating":
				ready, terminating = false, true
			case "weight":
				n, err := number(value)
				if err != nil {
					return err
				}
				worldgen.SetWeight(s, ip, n)
			case "zones":
				for z := range strings.SplitSeq(value, "+") {
					hints.ForZones = append(hints.ForZones, discovery.ForZone{Name: z})
				}
			case "nodes":
				for n := range strings.SplitSeq(value, "+") {
					hints.ForNodes = append(hints.ForNodes, discovery.ForNode{Name: n})
				}
			default:
				return fmt.Errorf("an endpoint has no %q", word)
			}
		}
		if hints.ForZones == nil && hints.ForNodes == nil {
			hints = nil
		}
		serving = serving || ready
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses: []string{ip}, NodeName: &node, Hints: hints,
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
		})
	}
	return nil
}
