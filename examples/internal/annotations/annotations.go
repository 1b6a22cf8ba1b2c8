// Package annotations reads annotations that control the choice of endpoints, for which the
// API has no fields. The example programs use its [Reader] as hooks of the tracker.
package annotations

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/tracker"
)

const (
	// Balance is an annotation of a Service: "random", which is the default, "source" or
	// "source-port".
	Balance = "go-proxier.github.io/balance"
	// Slots is an annotation of a Service: the smallest number of buckets of its hash
	// table, from 1 to 65535.
	Slots = "go-proxier.github.io/balance-slots"
	// Weight is an annotation of an EndpointSlice: the weight of its endpoints, from 0 to
	// 65535.
	Weight = "go-proxier.github.io/weight"
	// Weights is an annotation of an EndpointSlice: weights of single endpoints, such as
	// "10.244.1.7=3,10.244.2.4=0". They override Weight.
	Weights = "go-proxier.github.io/weights"
)

// Reader reads the annotations. It logs an invalid annotation and ignores it; the Service
// or EndpointSlice stays in use. Its methods are safe for concurrent use.
type Reader struct {
	// Log is required.
	Log *slog.Logger

	mu sync.Mutex
	// list is the last value of Weights, and weights its content. A slice's endpoints
	// arrive one after the other, so the value is parsed once.
	list    string
	weights map[netip.Addr]uint16
}

// OnService is for [tracker.Config.OnService].
func (r *Reader) OnService(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
	switch value := s.Annotations[Balance]; value {
	case "", "random":
	case "source":
		p.Hash = tracker.HashSource
	case "source-port":
		p.Hash = tracker.HashSourcePort
	default:
		r.warn("service", s.Namespace, s.Name, Balance, fmt.Errorf("%q is not random, source or source-port", value))
	}
	if value, ok := s.Annotations[Slots]; ok {
		n, err := number(value)
		if err != nil || n == 0 {
			r.warn("service", s.Namespace, s.Name, Slots, fmt.Errorf("%q is not a number from 1 to 65535", value))
		} else {
			p.HashBuckets = n
		}
	}
	return nil
}

// OnEndpoint is for [tracker.Config.OnEndpoint].
func (r *Reader) OnEndpoint(s *discovery.EndpointSlice, ep *discovery.Endpoint, e *tracker.Endpoint) error {
	// One log line for each slice is enough.
	first := len(s.Endpoints) != 0 && ep == &s.Endpoints[0]
	if value, ok := s.Annotations[Weight]; ok {
		if n, err := number(value); err == nil {
			e.Weight = n
		} else if first {
			r.warn("slice", s.Namespace, s.Name, Weight, fmt.Errorf("%q is not a number from 0 to 65535", value))
		}
	}
	value := s.Annotations[Weights]
	if value == "" {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if first || value != r.list {
		var bad error
		r.list = value
		if r.weights, bad = read(value); bad != nil && first {
			r.warn("slice", s.Namespace, s.Name, Weights, bad)
		}
	}
	if n, ok := r.weights[e.Addr.Addr().Unmap()]; ok {
		e.Weight = n
	}
	return nil
}

// read parses a value of Weights. It skips invalid items and returns an error for the last
// of them.
func read(list string) (weights map[netip.Addr]uint16, bad error) {
	weights = map[netip.Addr]uint16{}
	for one := range strings.SplitSeq(list, ",") {
		if one = strings.TrimSpace(one); one == "" {
			continue
		}
		address, value, _ := strings.Cut(one, "=")
		a, err := netip.ParseAddr(strings.TrimSpace(address))
		n, err2 := number(strings.TrimSpace(value))
		if errors.Join(err, err2) != nil {
			bad = fmt.Errorf("%q is not an address and a number from 0 to 65535", one)
			continue
		}
		weights[a.Unmap()] = n
	}
	return weights, bad
}

func (r *Reader) warn(kind, namespace, name, annotation string, err error) {
	r.Log.Warn("invalid annotation is ignored", kind, namespace+"/"+name, "annotation", annotation, "error", err)
}

func number(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err
}
