//go:build linux

package main

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
)

// mangleShare is the share of objects that are mangled: one in so many.
const mangleShare = 5

// mangleService makes some Services unusual or invalid. An API server rejects most of what it
// does, but not all of it: objects may be older than a check.
func (o *objects) mangleService(s *v1.Service) {
	// An API server gives each Service a health-check node port of its own. As long as two have the
	// same, each sync fails in part.
	if o.rng.IntN(20*mangleShare) == 0 {
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeLoadBalancer, v1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = int32(29100 + o.rng.IntN(2))
	}
	if o.rng.IntN(mangleShare) != 0 {
		return
	}
	r := o.rng
	edits := []func(){
		func() { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, o.oddAddress()) },
		func() {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: o.oddAddress()})
		},
		func() {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges,
				pick(r, "junk", "10.0.0.1/8", "10.0.0.0/33", "::ffff:10.0.0.0/104", " 10.0.0.0/8 ", "::/0"))
		},
		func() {
			s.Spec.ClusterIP = pick(r, "", "::ffff:10.96.0.3", "010.096.000.004", "224.0.0.5", "10.244.0.3")
		},
		func() { s.Spec.ClusterIPs = nil },
		func() { s.Spec.IPFamilies = nil },
		func() { s.Spec.Ports[0].Port = pick[int32](r, 0, -1, 65536, 65535, 1) },
		func() { s.Spec.Ports[0].NodePort = pick[int32](r, -1, 65536, 10249, 22) },
		func() { s.Spec.Ports[0].Protocol = pick[v1.Protocol](r, "", "tcp", "ICMP") },
		func() { s.Spec.Ports[0].Name = pick(r, "", "p1", strings.Repeat("x", 300)) },
		func() { s.Spec.Ports = append(s.Spec.Ports, s.Spec.Ports...) },
		func() { s.Spec.Ports = nil },
		func() {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			seconds := pick[int32](r, 0, 1, -1, 86400)
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
		},
		func() {
			s.Annotations = map[string]string{
				"go-proxier.github.io/balance":       pick(r, "source", "source-port", "maglev", "x\n\x1b[2Jy"),
				"go-proxier.github.io/balance-slots": pick(r, "64", "0", "-1", "junk"),
			}
		},
		func() {
			d := pick(r, "PreferClose", "PreferSameNode", "PreferSameZone", "junk")
			s.Spec.TrafficDistribution = &d
		},
		func() { s.Spec.ExternalTrafficPolicy = "junk" },
	}
	// Edits of Services without ports have nothing to edit.
	if len(s.Spec.Ports) != 0 {
		pick(r, edits...)()
	}
}

// mangleSlice makes some slices unusual or invalid.
func (o *objects) mangleSlice(s *discovery.EndpointSlice) {
	if o.rng.IntN(mangleShare) != 0 || len(s.Endpoints) == 0 || len(s.Ports) == 0 {
		return
	}
	r := o.rng
	ep, port := &s.Endpoints[0], &s.Ports[0]
	pick(r,
		func() { ep.Addresses = []string{o.oddAddress()} },
		func() { ep.Addresses = nil },
		func() { ep.Addresses = append(ep.Addresses, "10.244.0.77") },
		func() { ep.NodeName = nil },
		func() { ep.Conditions = discovery.EndpointConditions{} },
		func() { s.Endpoints = append(s.Endpoints, s.Endpoints...) },
		func() { port.Port = nil },
		func() { n := pick[int32](r, 0, -1, 65536); port.Port = &n },
		func() { port.Name = nil },
		func() { port.Protocol = nil },
		func() { p := pick[v1.Protocol](r, "", "x"); port.Protocol = &p },
		func() { s.Ports = nil },
		func() { s.AddressType = pick[discovery.AddressType](r, "FQDN", "", "ipv4") },
		func() { s.Labels = nil },
		func() { s.Labels = map[string]string{discovery.LabelServiceName: ""} },
		func() { s.Labels = map[string]string{discovery.LabelServiceName: pick(r, "svc-0", "svc-1")} },
	)()
}

// oddAddress returns an address that no frontend or endpoint should have.
func (o *objects) oddAddress() string {
	return pick(o.rng, "127.0.0.1", "::1", "169.254.169.254", "fe80::1", "fe80::1%eth0", "224.0.0.1", "255.255.255.255", "0.0.0.0", "::",
		"10.96.0.1", "fd00:96::1", nodeAddr4, otherAddr4, nodeAddr6, "::ffff:10.244.0.9", "010.244.000.007", "64:ff9b::10.1.2.3", "junk", "")
}
