// Package annotations reads annotations that control the choice of endpoints, for which the
// API has no fields. The example programs use its [Reader] as hooks of the tracker.
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
	// Weight is an annotation of an EndpointSlice: the weight of its endpoints, from 0 to
	// 65535.
	Weight = prefix + "weight"
	// Weights is an annotation of an EndpointSlice: weights of single endpoints, such as
	// "10.244.1.7=3,10.244.2.4=0". They override Weight.
	Weights = prefix + "weights"
)

// Known returns the names of all annotations without their common prefix, as [NewReader]
// accepts them.
func Known() []string { return []string{"balance", "balance-slots", "weight", "weights"} }

// Reader reads the annotations that are allowed. It ignores an annotation that is not allowed
// or invalid and reports it by a [*tracker.WarningError]; the Service or EndpointSlice stays in
// use. Its methods are safe for concurrent use.
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
		r.allowed[prefix+name] = true
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
		}
	}
	return w.err()
}

// OnEndpoint is for [tracker.Config.OnEndpoint].
func (r *Reader) OnEndpoint(s *discovery.EndpointSlice, ep *discovery.Endpoint, e *tracker.Endpoint) error {
	w := warnings{ignored: len(s.Endpoints) != 0 && ep != &s.Endpoints[0]}
	if value := r.value(s.Annotations, Weight, &w); value != "" {
		if n, ok := number(value); ok {
			e.Weight = n
		} else {
			w.invalid(Weight, value, "a number from 0 to 65535")
		}
	}
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
