package main

import (
	"cmp"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const (
	// annotation chooses a Service's load balancer.
	annotation = "proxier.example/balancer"
	// sourceHash is the load balancer that sends a client to one endpoint.
	sourceHash = "source-hash"
)

// balancers returns the names of the load balancers, the default first.
func balancers() []string {
	return []string{string(dataplane.WeightedRoundRobin), string(dataplane.RoundRobin), string(dataplane.LeastConnections), sourceHash}
}

// checkBalancer returns an error if name is not one of balancers.
func checkBalancer(name string) error {
	if !slices.Contains(balancers(), name) {
		return fmt.Errorf("unknown algorithm %q, want one of %v", name, balancers())
	}
	return nil
}

// settings is this program's extension of a Service port.
type settings struct {
	balancer string
	// port is the Service's own port if it is served at another one.
	port uint16
}

// Equal implements [tracker.Extension].
func (s settings) Equal(o tracker.Extension) bool { return o == s }

// settingsOf returns the settings of a Service port.
func settingsOf(p *tracker.ServicePort) settings {
	s, _ := p.Ext.(settings)
	return s
}

// setBalancer is a hook that stores the load balancer. The tracker logs an unknown load
// balancer and leaves the Service out.
func setBalancer(s *v1.Service, p *tracker.ServicePort, usual string) error {
	own := settings{balancer: cmp.Or(s.Annotations[annotation], usual)}
	if own.balancer == sourceHash {
		p.Hash = tracker.HashSource
	}
	p.Ext = own
	return checkBalancer(own.balancer)
}

// algorithm returns a Service's load balancer.
func algorithm(s *ruleset.Port) dataplane.Algorithm {
	return dataplane.Algorithm(settingsOf(s.Spec).balancer)
}
