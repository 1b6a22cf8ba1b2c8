package conformance

import (
	"cmp"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The functions of this file read words of scripts. They panic with a syntaxError.

// aim is a target with protocols.
type aim struct {
	protocols []v1.Protocol
	to        target
}

var both = []v1.Protocol{tcp, udp}

// parseAims returns targets. A protocol or family holds for those behind it.
func parseAims(text string) (out []aim) {
	protocols := both
	var family tracker.Family
	for word := range strings.FieldsSeq(text) {
		switch word {
		case "TCP", "UDP", "SCTP":
			protocols = []v1.Protocol{v1.Protocol(word)}
		case "IPv4", "IPv6":
			family = parseFamily(word)
		default:
			name, port, ok := strings.Cut(word, ":")
			if !ok {
				fail("%q is no target: ADDRESS:PORT", word)
			}
			t := addressNamed(name, number(port))
			if family != 0 {
				t = in(family, t)
			}
			out = append(out, aim{protocols, t})
		}
	}
	if len(out) == 0 {
		fail("a target is missing")
	}
	return out
}

func parseFamily(word string) tracker.Family {
	return []tracker.Family{tracker.IPv4, tracker.IPv6}[oneOf(word, "IPv4", "IPv6")]
}

// maxNumber is the greatest number of a named address.
const maxNumber = 199

// numberOf splits a name into a word and a number.
func numberOf(name string) (word string, n int) {
	word = strings.TrimRight(name, "0123456789")
	n, _ = strconv.Atoi(name[len(word):])
	return word, n
}

// addressNamed returns the port of a named address.
func addressNamed(name string, port int) target {
	kind, n := numberOf(name)
	several := map[string]func(n, port int) target{"cluster": clusterIP, "external": externalIP, "lb": loadBalancerIP, "pod": atPod}
	if f := several[kind]; f != nil && n > 0 && n <= maxNumber {
		return f(n, port)
	}
	single := map[string]func(int) target{"node": atPrimary, "node2": atSecondary, "gateway": atGateway, "loopback": atLoopback, "loopback2": atLoopback2}
	f := single[name]
	if f == nil {
		fail("there is no address %q", name)
	}
	return f(port)
}

// eachWord calls set with each word of the form KEY=VALUE.
func eachWord(text string, set func(key, value string)) {
	for word := range strings.FieldsSeq(text) {
		key, value, _ := strings.Cut(word, "=")
		if value == "" {
			fail("%q is not of the form KEY=VALUE", word)
		}
		set(key, value)
	}
}

// oneOf returns the index of a value.
func oneOf(value string, choices ...string) int {
	i := slices.Index(choices, value)
	if i < 0 {
		fail("%q must be one of %q", value, choices)
	}
	return i
}

func yes(value string) bool   { return oneOf(value, "no", "yes") == 1 }
func local(value string) bool { return oneOf(value, "Cluster", "Local") == 1 }

// number returns a number of up to 65535.
func number(text string) int {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		fail("%q is no number of up to 65535", text)
	}
	return int(n)
}

// list returns the parts of a value between commas, and nothing for "none".
func list[T any](value string, parse func(string) T) (out []T) {
	if value == "none" {
		return nil
	}
	for part := range strings.SplitSeq(value, ",") {
		out = append(out, parse(part))
	}
	return out
}

func itself(text string) string { return text }

// word sets a part of the configuration.
func (c *config) word(key, value string) {
	switch key {
	case "clients":
		c.clients = number(value)
	case "remotePods":
		c.remotePods = number(value)
	case "masqueradeAll":
		c.masqueradeAll = yes(value)
	case "nodePortAddresses":
		c.nodePortAddresses = list(value, itself)
	case "bound":
		c.bound = list(value, func(name string) target { return addressNamed(name, 80) })
	case "local":
		cluster := each([]tracker.Family{tracker.IPv4, tracker.IPv6}, allPodsCIDR)
		c.localTraffic = &[]ruleset.LocalTraffic{
			{}, {CIDRs: cluster}, {Bridge: bridgeName}, {InterfacePrefix: interfacePrefix},
		}[oneOf(value, "none", "clusterCIDR", "bridge", "prefix")]
		c.bridge = value == "bridge"
	default:
		fail("there is no setting %q", key)
	}
}

// parseNode returns the step that changes the node.
func parseNode(text string) func(*play) {
	key, value, _ := strings.Cut(text, "=")
	var address target
	if oneOf(key, "zone", "address") == 1 {
		address = addressNamed(value, 0)
	}
	return func(w *play) {
		n := w.node()
		if key == "zone" {
			n.Zone = value
		} else {
			n.Addresses = each(w.families(), func(f tracker.Family) netip.Addr { return address.at(f).Addr() })
		}
		w.setNode(n)
	}
}

// word sets a part of a Service.
func (s *service) word(key, value string) {
	switch key {
	case "cluster":
		s.number = number(value)
	case "type":
		oneOf(value, "ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
		s.kind = v1.ServiceType(value)
	case "ports":
		s.ports = slices.Concat(list(value, parsePorts)...)
	case "external":
		s.external = list(value, func(name string) target {
			if word, _ := numberOf(name); word == "" {
				name = key + name
			}
			return addressNamed(name, 0)
		})
	case "lb":
		s.loadBalancer = list(value, func(n string) target { return addressNamed(key+n, 0) })
	case "lbMode":
		oneOf(value, "VIP", "Proxy")
		s.ipMode = v1.LoadBalancerIPMode(value)
	case "created":
		s.created = int64(number(value))
	case "sources":
		s.sources = list(strings.ReplaceAll(value, "_", " "), itself)
	case "internalPolicy":
		s.internalLocal = local(value)
	case "externalPolicy":
		s.externalLocal = local(value)
	case "preferLocal":
		s.preferLocal = yes(value)
	case "affinity":
		s.affinity = int32(number(value))
	case "hash":
		s.hash = tracker.Hash(oneOf(value, "none", "source", "source-and-port"))
	case "endpoints":
		s.endpoints = list(value, parseEndpoint)
	case "endpointsIn":
		s.endpointsIn = list(value, parseFamily)
	default:
		fail("a Service has no %q", key)
	}
}

// portForm is the form of ports: [NAME@]PORT[:NODEPORT][>TARGET][/PROTOCOL].
var portForm = regexp.MustCompile(`^(?:([a-z0-9-]+)@)?(\d+)(?::(\d+))?(?:>(\d+))?(?:/(TCP|UDP|SCTP))?$`)

// parsePorts returns a port, or without a protocol one for TCP and one for UDP.
func parsePorts(text string) []port {
	m := portForm.FindStringSubmatch(text)
	if m == nil {
		fail("a port has the form [NAME@]PORT[:NODEPORT][>TARGET][/PROTOCOL], not %q", text)
	}
	at := func(i int) int32 { return int32(number("0" + m[i])) }
	p := port{name: m[1], port: at(2), nodePort: at(3), target: cmp.Or(at(4), podPort), protocol: v1.Protocol(m[5])}
	if p.protocol != "" {
		return []port{p}
	}
	other := p
	p.protocol, other.protocol = tcp, udp
	p.name, other.name = strings.TrimPrefix(p.name+"-tcp", "-"), strings.TrimPrefix(p.name+"-udp", "-")
	return []port{p, other}
}

// parseEndpoint returns the endpoint of the form POD[/CONDITION...].
func parseEndpoint(text string) (e endpoint) {
	words := strings.Split(text, "/")
	e.pod = words[0]
	if !result.MatchString(e.pod) || strings.ContainsAny(e.pod, ":*") {
		fail("there is no pod %q", e.pod)
	}
	for _, word := range words[1:] {
		switch key, value, _ := strings.Cut(word, "="); key {
		case "unready":
			e.unready = true
		case "serving":
			e.serving = true
		case "terminating":
			e.unready, e.terminating = true, true
		case "weight":
			n := number(value)
			e.weight = &n
		case "zones":
			e.zones = strings.Split(value, "+")
		case "nodes":
			e.nodes = strings.Split(value, "+")
		default:
			fail("an endpoint has no %q", word)
		}
	}
	return e
}

func parsePrefix(text string) netip.Prefix {
	p, err := netip.ParsePrefix(text)
	if err != nil {
		fail("%q is no CIDR", text)
	}
	return p
}
