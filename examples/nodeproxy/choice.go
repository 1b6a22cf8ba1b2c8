package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/tracker"
)

// Annotations of this agent's own, by which objects say how endpoints are chosen.
const (
	// annotationBalance is a Service's: "random", which is the default, "source" or
	// "source-port".
	annotationBalance = "go-proxier.github.io/balance"
	// annotationSlots is a Service's: how many slots its table has at least, from 1 to
	// 65535.
	annotationSlots = "go-proxier.github.io/balance-slots"
	// annotationWeight is an EndpointSlice's: the weight of its endpoints, from 0 to
	// 65535.
	annotationWeight = "go-proxier.github.io/weight"
	// annotationWeights is an EndpointSlice's: the weights of some of its endpoints,
	// which go before the other, as "10.244.1.7=3,10.244.2.4=0".
	annotationWeights = "go-proxier.github.io/weights"
)

// choice reads the annotations. What cannot be read is logged, and is as if it were
// not there: nobody's Service is to be lost for it.
type choice struct{ log *slog.Logger }

// onService is a hook of the tracker's.
func (c choice) onService(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
	switch value := s.Annotations[annotationBalance]; value {
	case "", "random":
	case "source":
		p.Hash = tracker.HashSource
	case "source-port":
		p.Hash = tracker.HashSourcePort
	default:
		c.complain("service", s.Namespace, s.Name, annotationBalance, fmt.Errorf("%q is none of random, source and source-port", value))
	}
	if value, ok := s.Annotations[annotationSlots]; ok {
		n, err := number(value)
		if err != nil || n == 0 {
			c.complain("service", s.Namespace, s.Name, annotationSlots, fmt.Errorf("%q is not a number from 1 to 65535", value))
		} else {
			p.HashSlots = n
		}
	}
	return nil
}

// onEndpoint is a hook of the tracker's.
func (c choice) onEndpoint(s *discovery.EndpointSlice, ep *discovery.Endpoint, e *tracker.Endpoint) error {
	// Once a slice is enough.
	first := len(s.Endpoints) != 0 && ep == &s.Endpoints[0]
	if value, ok := s.Annotations[annotationWeight]; ok {
		if n, err := number(value); err == nil {
			e.Weight = n
		} else if first {
			c.complain("slice", s.Namespace, s.Name, annotationWeight, fmt.Errorf("%q is not a number from 0 to 65535", value))
		}
	}
	var bad error
	for one := range strings.SplitSeq(s.Annotations[annotationWeights], ",") {
		if one = strings.TrimSpace(one); one == "" {
			continue
		}
		address, value, _ := strings.Cut(one, "=")
		a, err := netip.ParseAddr(strings.TrimSpace(address))
		n, err2 := number(strings.TrimSpace(value))
		if err := errors.Join(err, err2); err != nil {
			bad = fmt.Errorf("%q is not an address and a number from 0 to 65535", one)
		} else if a.Unmap() == e.Addr.Addr().Unmap() {
			e.Weight = n
		}
	}
	if bad != nil && first {
		c.complain("slice", s.Namespace, s.Name, annotationWeights, bad)
	}
	return nil
}

func (c choice) complain(kind, namespace, name, annotation string, err error) {
	c.log.Warn("annotation is ignored", kind, namespace+"/"+name, "annotation", annotation, "error", err)
}

func number(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err
}
