// Package annotations reads annotations for which the API has no fields: they control the choice
// of endpoints. The example programs use its [Reader] as hooks of the tracker.
package annotations

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

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
	// Slots is an annotation of a Service: the number of buckets of its hash table, as
	// [tracker.ServicePort].HashBuckets, from 1 to 65535.
	Slots = prefix + "balance-slots"
	// PreferLocal is an annotation of a Service: "true" makes traffic to its NodePorts,
	// external and load-balancer IPs use the node's own endpoints while it has any.
	PreferLocal = prefix + "prefer-local"
	// Scheduler is an annotation of a Service: the scheduler of its virtual servers in mode ipvs, such
	// as "lc". "mh,port" and "sh,port" hash the client's port, too, and "rr,one-packet" chooses an
	// endpoint for each UDP packet that is forwarded directly.
	Scheduler = prefix + "ipvs-scheduler"
	// Forwarding is an annotation of a Service: "direct", "tunnel", "gue" or "gre" is how mode ipvs sends
	// packets to its external and load-balancer IPs to endpoints, which then answer the client themselves.
	Forwarding = prefix + "ipvs-forwarding"
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
	return []string{"balance", "balance-slots", "prefer-local", "ipvs-scheduler", "ipvs-forwarding", "weight", "weights", CiliumWeight}
}

// Reader reads the annotations that are allowed. It ignores an annotation that is not allowed
// or invalid and reports it by a [tracker.Warning]; the Service or EndpointSlice stays in
// use. It does not report an annotation of another project that is not allowed. Its methods
// are safe for concurrent use.
type Reader struct {
	allowed map[string]bool

	mu sync.Mutex
	// list is the last value of Weights, weights its content and bad an invalid item.
	// The endpoints of a slice arrive one after the other, so the value is parsed once.
	list    string
	weights map[netip.Addr]uint16
	bad     string
}

// NewReader returns a Reader that allows some of [Known]. It returns an error for any other
// name.
func NewReader(allowed []string) (*Reader, error) {
	r := &Reader{allowed: map[string]bool{}}
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
func (r *Reader) OnService(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
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
			if n > ruleset.MaxBuckets {
				w.add("annotation %s: a table has at most %d slots, or as many as its endpoints need", Slots, ruleset.MaxBuckets)
			}
		}
	}
	p.PreferLocal = r.flag(s.Annotations, PreferLocal, &w)
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
	if server != (Server{}) {
		p.Ext = server
	}
	return w.err()
}

// Server holds the values of [Scheduler] and [Forwarding] as a Service port's extension.
type Server struct {
	Scheduler       string
	Port, OnePacket bool
	Forwarding      string
}

// Equal implements [tracker.Extension].
func (s Server) Equal(o tracker.Extension) bool { return o == tracker.Extension(s) }

func (s *Server) parse(value string) bool {
	name, flag, _ := strings.Cut(value, ",")
	name, flag = strings.TrimSpace(name), strings.TrimSpace(flag)
	if name == "" || len(name) > 15 || flag != "" && flag != "port" && flag != "one-packet" {
		return false
	}
	s.Scheduler, s.Port, s.OnePacket = name, flag == "port", flag == "one-packet"
	return true
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

// number parses a number of 16 bits.
func number(s string) (n uint16, ok bool) {
	if len(s) > 20 { // the error of ParseUint would hold a copy
		return 0, false
	}
	v, err := strconv.ParseUint(s, 10, 16)
	return uint16(v), err == nil
}
