// Package annotations reads annotations for which the API has no fields: they control the choice
// of endpoints and extend ports to ranges. The example programs use its [Reader] as hooks of the
// tracker.
package annotations

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// prefix begins the names of all annotations.
const prefix = "go-proxier.github.io/"

const (
	// Balance is an annotation of a Service: "random", which is the default, "source" or
	// "source-port".
	Balance = prefix + "balance"
	// Slots is an annotation of a Service: the smallest number of buckets of its hash
	// table, from 1 to 65535.
	Slots = prefix + "balance-slots"
	// PreferLocal is an annotation of a Service: "true" makes traffic to its NodePorts,
	// external and load-balancer IPs use the node's own endpoints while it has any.
	PreferLocal = prefix + "prefer-local"
	// PortRanges is an annotation of a Service: ranges of ports for some of its ports, such as
	// "rtp=10000-20000,media=4000-4999:30000,game=all". The range begins and ends with the ports
	// of the cluster IP and load-balancer IPs. The number after the colon is the endpoints' port
	// for the first one; without it, they see the port that the client used. "all" means all
	// ports of the protocol. A port without a name has an item without one: "10000-20000". The
	// range must contain the port itself. A Service has at most eight ranges. Source:
	// kubernetes/kubernetes#23864.
	PortRanges = prefix + "port-ranges"
	// Scheduler is an annotation of a Service: the scheduler of its virtual servers in mode ipvs, such
	// as "lc". "mh,port" and "sh,port" hash the client's port, too, and "rr,one-packet" chooses an
	// endpoint for each UDP packet that is forwarded directly.
	Scheduler = prefix + "ipvs-scheduler"
	// Forwarding is an annotation of a Service: "direct", "tunnel", "gue" or "gre" is how mode ipvs sends
	// packets to its external and load-balancer IPs to endpoints, which then answer the client themselves.
	Forwarding = prefix + "ipvs-forwarding"
	// DrainLimit is an annotation of a Service: how long connections to its removed endpoints may stay
	// open in mode ipvs, such as "90s". It can shorten the operator's limit for all Services.
	DrainLimit = prefix + "ipvs-drain-limit"
	// Weight is an annotation of an EndpointSlice: the weight of its endpoints, from 0 to
	// 65535.
	Weight = prefix + "weight"
	// Weights is an annotation of an EndpointSlice: weights of single endpoints, such as
	// "10.244.1.7=3,10.244.2.4=0". They override Weight.
	Weights = prefix + "weights"
	// CiliumWeight is an annotation of an EndpointSlice that Cilium reads, too: the weight
	// of its endpoints, from 0 to 65535. 0 means that they get no new connections. Where
	// it is allowed, an endpoint without a weight has [CiliumDefault], as in Cilium. Weight
	// and Weights override it. Source: cilium/cilium#46061.
	CiliumWeight = "service.cilium.io/weight"
)

// CiliumDefault is Cilium's weight of an endpoint without a weight
// (cilium-dbg service update --backend-weights).
const CiliumDefault = 100

// Known returns the names of all annotations, as [NewReader] accepts them: those of this
// project without their common prefix.
func Known() []string {
	return []string{"balance", "balance-slots", "prefer-local", "port-ranges", "ipvs-scheduler", "ipvs-forwarding", "ipvs-drain-limit", "weight", "weights", CiliumWeight}
}

// Reader reads the annotations that are allowed. It ignores an annotation that is not allowed
// or invalid and reports it by a [*tracker.WarningError]; the Service or EndpointSlice stays in
// use. It does not report an annotation of another project that is not allowed. Its methods
// are safe for concurrent use.
type Reader struct {
	allowed map[string]bool
	ranges  ruleset.PortRanges

	mu sync.Mutex
	// list is the last value of Weights, weights its content and bad an invalid item.
	// The endpoints of a slice arrive one after the other, so the value is parsed once.
	list    string
	weights map[netip.Addr]uint16
	bad     string
	// rangeList is the last value of PortRanges, and items holds the ranges in it by the name of
	// their port. The ports of a Service arrive one after the other, too.
	rangeList  string
	rangeCount int
	items      map[string][]string
}

// NewReader returns a Reader that allows some of [Known]. It returns an error for any other
// name. The data plane serves ranges: the Reader ignores values of [PortRanges] that need more, so
// that the port is served alone instead of not at all.
func NewReader(allowed []string, ranges ruleset.PortRanges) (*Reader, error) {
	r := &Reader{allowed: map[string]bool{}, ranges: ranges}
	for _, name := range allowed {
		if !slices.Contains(Known(), name) {
			return nil, fmt.Errorf("unknown annotation %q: known are %s", name, strings.Join(Known(), ", "))
		}
		if !strings.Contains(name, "/") {
			name = prefix + name
		}
		r.allowed[name] = true
	}
	return r, nil
}

// warnings collects what is wrong with the annotations of an object.
type warnings struct {
	// ignored makes add do nothing: one warning is enough for a slice of a thousand
	// endpoints, and formatting is expensive.
	ignored bool
	list    []error
}

func (w *warnings) add(format string, args ...any) {
	if !w.ignored {
		w.list = append(w.list, fmt.Errorf(format, args...))
	}
}

// invalid adds that the value of an annotation, or a part of it, is not as expected.
func (w *warnings) invalid(annotation, value, expected string) {
	w.add("annotation %s is ignored: %q is not %s", annotation, complaint.Value(value), expected)
}

// err returns a warning about an accepted object, or nil.
func (w *warnings) err() error {
	if len(w.list) == 0 {
		return nil
	}
	return tracker.Warning("%w", errors.Join(w.list...))
}

// value returns the value of an annotation, or "" if it is missing or not allowed. It adds the
// latter to w.
func (r *Reader) value(all map[string]string, name string, w *warnings) string {
	v := all[name]
	if v == "" || r.allowed[name] {
		return v
	}
	w.add("annotation %s is ignored: it is not allowed", name)
	return ""
}

// flag returns the value of an annotation that is "true" or "false", which is the default.
func (r *Reader) flag(all map[string]string, name string, w *warnings) bool {
	switch value := r.value(all, name, w); value {
	case "", "false":
	case "true":
		return true
	default:
		w.invalid(name, value, "true or false")
	}
	return false
}

// OnService is for [tracker.Config.OnService].
func (r *Reader) OnService(s *v1.Service, port *v1.ServicePort, p *tracker.ServicePort) error {
	var w warnings
	switch value := r.value(s.Annotations, Balance, &w); value {
	case "", "random":
	case "source":
		p.Hash = tracker.HashSource
	case "source-port":
		p.Hash = tracker.HashSourcePort
	default:
		w.invalid(Balance, value, "random, source or source-port")
	}
	if value := r.value(s.Annotations, Slots, &w); value != "" {
		n, ok := number(value)
		if !ok || n == 0 {
			w.invalid(Slots, value, "a number from 1 to 65535")
		} else {
			p.HashBuckets = n
		}
	}
	p.PreferLocal = r.flag(s.Annotations, PreferLocal, &w)
	if value := r.value(s.Annotations, PortRanges, &w); value != "" {
		if len(s.Spec.Ports) != 0 && port == &s.Spec.Ports[0] {
			checkNames(value, s, &w)
		}
		r.setRange(value, p, &w)
	}
	var server Server
	if value := r.value(s.Annotations, Scheduler, &w); value != "" && !server.parse(value) {
		w.invalid(Scheduler, value, "a scheduler, such as lc, or mh,port")
	}
	switch value := r.value(s.Annotations, Forwarding, &w); value {
	case "", "direct", "tunnel", "gue", "gre":
		server.Forwarding = value
	default:
		w.invalid(Forwarding, value, "direct, tunnel, gue or gre")
	}
	if value := r.value(s.Annotations, DrainLimit, &w); value != "" {
		if d, ok := duration(value); ok {
			server.DrainLimit = d
		} else {
			w.invalid(DrainLimit, value, "a duration of at least a second, such as 90s")
		}
	}
	if server != (Server{}) {
		p.Ext = server
	}
	return w.err()
}

// Server holds the values of [Scheduler], [Forwarding] and [DrainLimit] as a Service port's extension.
type Server struct {
	Scheduler       string
	Port, OnePacket bool
	Forwarding      string
	DrainLimit      time.Duration
}

// Equal implements [tracker.Extension].
func (s Server) Equal(o tracker.Extension) bool { return o == tracker.Extension(s) }

// parse reads a value of [Scheduler].
func (s *Server) parse(value string) bool {
	name, flag, _ := strings.Cut(value, ",")
	name, flag = strings.TrimSpace(name), strings.TrimSpace(flag)
	if name == "" || len(name) > 15 || flag != "" && flag != "port" && flag != "one-packet" {
		return false
	}
	s.Scheduler, s.Port, s.OnePacket = name, flag == "port", flag == "one-packet"
	return true
}

// maxRanges is the longest value of PortRanges in bytes.
const maxRanges = 4096

// mostRanges is the largest number of ranges of a Service. The kernel takes 0.3 to 1.1 ms to remove one
// from nftables' maps, and ranges at one address are removed in one transaction.
const mostRanges = 8

// rangeItems returns the items of a value of PortRanges, each with the name of its port.
func rangeItems(value string) iter.Seq2[string, string] {
	return func(yield func(name, ports string) bool) {
		for one := range strings.SplitSeq(value, ",") {
			if one = strings.TrimSpace(one); one == "" {
				continue
			}
			name, ports, named := strings.Cut(one, "=")
			if !named {
				name, ports = "", one
			}
			if !yield(strings.TrimSpace(name), ports) {
				return
			}
		}
	}
}

// checkNames adds the first item of a value of PortRanges that names no port of the Service.
func checkNames(value string, s *v1.Service, w *warnings) {
	if len(value) > maxRanges {
		return
	}
	known := make(map[string]bool, len(s.Spec.Ports))
	for i := range s.Spec.Ports {
		known[s.Spec.Ports[i].Name] = true
	}
	for name := range rangeItems(value) {
		if !known[name] {
			w.add("annotation %s is ignored in part: the Service has no port %q", PortRanges, complaint.Value(name))
			return
		}
	}
}

// setRange extends a port to the range that a value of PortRanges has for it.
//
// A Service with external IPs gets no range. Its author may write any address there, such as one
// of the node, and would take the packets to all servers of the node in one go.
func (r *Reader) setRange(value string, p *tracker.ServicePort, w *warnings) {
	if len(value) > maxRanges {
		w.add("annotation %s is ignored: it has more than %d bytes", PortRanges, maxRanges)
		return
	}
	items, count := r.rangesOf(value, p.Key.Port)
	if len(items) == 0 {
		return
	}
	first, last, target, ok := parseRange(items[0])
	switch {
	case count > mostRanges:
		w.add("annotation %s is ignored: it has %d ranges, at most %d are possible", PortRanges, count, mostRanges)
	case len(items) > 1:
		w.add("annotation %s is ignored: it has %d ranges for the port", PortRanges, len(items))
	case !ok:
		w.invalid(PortRanges, items[0], "a range of ports such as 10000-20000, 10000-20000:30000 or all")
	case p.Port < first || p.Port > last:
		w.add("annotation %s is ignored: ports %d to %d do not contain the port itself, %d", PortRanges, first, last, p.Port)
	case len(p.ExternalIPs) != 0:
		w.add("annotation %s is ignored: the Service has external IPs, which cannot have ranges", PortRanges)
	case r.ranges == ruleset.PortRangesNone:
		w.add("annotation %s is ignored: this mode has no ranges of ports", PortRanges)
	case target != first && r.ranges < ruleset.PortRangesShifted:
		w.add("annotation %s is ignored: this mode cannot shift a range", PortRanges)
	default:
		p.Port, p.LastPort, p.TargetPort = first, last, target
	}
}

// rangesOf returns the ranges that a value of PortRanges has for a port, and their number for all
// ports.
func (r *Reader) rangesOf(value, port string) (of []string, count int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if value != r.rangeList {
		r.rangeList, r.items, r.rangeCount = value, map[string][]string{}, 0
		for name, ports := range rangeItems(value) {
			r.items[name] = append(r.items[name], ports)
			r.rangeCount++
		}
	}
	return r.items[port], r.rangeCount
}

// parseRange parses a range of ports, "FIRST-LAST", "FIRST-LAST:TARGET" or "all". target is the
// endpoints' port for the first one.
func parseRange(s string) (first, last, target uint16, ok bool) {
	ports, to, shifted := strings.Cut(s, ":")
	if strings.TrimSpace(ports) == "all" {
		ports = "1-65535"
	}
	a, b, _ := strings.Cut(ports, "-")
	if !shifted {
		to = a
	}
	for i, n := range []*uint16{&first, &last, &target} {
		if *n, ok = number(strings.TrimSpace([]string{a, b, to}[i])); !ok || *n == 0 {
			return 0, 0, 0, false
		}
	}
	return first, last, target, first < last && int(target)+int(last-first) <= math.MaxUint16
}

// OnEndpoint is for [tracker.Config.OnEndpoint].
func (r *Reader) OnEndpoint(s *discovery.EndpointSlice, ep *discovery.Endpoint, e *tracker.Endpoint) error {
	w := warnings{ignored: len(s.Endpoints) != 0 && ep != &s.Endpoints[0]}
	set := func(name, value string) {
		if value == "" {
			return
		}
		if n, ok := number(value); ok {
			e.Weight = n
		} else {
			w.invalid(name, value, "a number from 0 to 65535")
		}
	}
	if r.allowed[CiliumWeight] {
		e.Weight = CiliumDefault
		set(CiliumWeight, s.Annotations[CiliumWeight])
	}
	set(Weight, r.value(s.Annotations, Weight, &w))
	if value := r.value(s.Annotations, Weights, &w); value != "" {
		r.mu.Lock()
		defer r.mu.Unlock()
		if value != r.list {
			r.list = value
			r.weights, r.bad = read(value)
		}
		if n, ok := r.weights[e.Addr.Addr().Unmap()]; ok {
			e.Weight = n
		}
		if r.bad != "" {
			w.invalid(Weights, r.bad, "an address and a number from 0 to 65535")
		}
	}
	return w.err()
}

// read parses a value of Weights. It skips invalid items and returns the last of them.
func read(list string) (weights map[netip.Addr]uint16, bad string) {
	weights = map[netip.Addr]uint16{}
	for one := range strings.SplitSeq(list, ",") {
		if one = strings.TrimSpace(one); one == "" {
			continue
		}
		address, value, _ := strings.Cut(one, "=")
		a, err := netip.ParseAddr(strings.TrimSpace(address))
		n, ok := number(strings.TrimSpace(value))
		if err != nil || !ok {
			bad = one
			continue
		}
		weights[a.Unmap()] = n
	}
	return weights, bad
}

// duration parses a duration of at least a second.
func duration(s string) (d time.Duration, ok bool) {
	if len(s) > 20 { // the error of ParseDuration would hold a copy
		return 0, false
	}
	d, err := time.ParseDuration(s)
	return d, err == nil && d >= time.Second
}

// number parses a number of 16 bits.
func number(s string) (n uint16, ok bool) {
	if len(s) > 20 { // the error of ParseUint would hold a copy
		return 0, false
	}
	v, err := strconv.ParseUint(s, 10, 16)
	return uint16(v), err == nil
}
