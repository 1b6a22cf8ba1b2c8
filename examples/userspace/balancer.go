package main

import (
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/userspace/balance"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// annotation chooses a Service's load balancer.
const annotation = "proxier.example/balancer"

// settings is this program's extension of a Service port.
type settings struct {
	// balancer is the load balancer's name; empty for the default.
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

// readAnnotation is a hook that stores the load balancer. The tracker logs an unknown load
// balancer and leaves the Service out.
func readAnnotation(s *v1.Service, p *tracker.ServicePort) error {
	own := settingsOf(p)
	if own.balancer = s.Annotations[annotation]; own.balancer != "" {
		if _, err := balance.Parse(own.balancer); err != nil {
			return err
		}
	}
	p.Ext = own
	return nil
}

// algorithm returns a function that returns a Service's load balancer.
func algorithm(usual balance.Algorithm) func(*ruleset.Port) balance.Algorithm {
	return func(s *ruleset.Port) balance.Algorithm {
		if a, err := balance.Parse(settingsOf(s.Spec).balancer); err == nil {
			return a
		}
		return usual
	}
}
