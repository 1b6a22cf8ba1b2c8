package tracker_test

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/tracker"
)

// proxier is shaped like kube-proxy's: handlers for informers, and a function that
// brings the data plane up to date.
type proxier struct {
	services  *tracker.ServiceChangeTracker
	endpoints *tracker.EndpointsChangeTracker
	node      tracker.NodeInfo
	sync      func() // the runner's Trigger
}

func (p *proxier) OnServiceAdd(s *v1.Service)    { p.OnServiceUpdate(nil, s) }
func (p *proxier) OnServiceDelete(s *v1.Service) { p.OnServiceUpdate(s, nil) }
func (p *proxier) OnServiceUpdate(old, s *v1.Service) {
	if p.services.Update(old, s) {
		p.sync()
	}
}

func (p *proxier) OnEndpointSliceAdd(s *discovery.EndpointSlice)       { p.slice(s, false) }
func (p *proxier) OnEndpointSliceUpdate(_, s *discovery.EndpointSlice) { p.slice(s, false) }
func (p *proxier) OnEndpointSliceDelete(s *discovery.EndpointSlice)    { p.slice(s, true) }

func (p *proxier) slice(s *discovery.EndpointSlice, remove bool) {
	if p.endpoints.EndpointSliceUpdate(s, remove) {
		p.sync()
	}
}

// syncProxyRules processes all Services, as kube-proxy's does.
func (p *proxier) syncProxyRules() {
	services := p.services.Take()
	endpoints := p.endpoints.Take()
	fmt.Println("changed:", len(services), "services, endpoints of", len(endpoints))

	byKey := p.endpoints.Map()
	for key, port := range p.services.Map() {
		use := tracker.Select(port, byKey[key], p.node)
		fmt.Println(key, port, "leads to", use.Cluster)
	}
}

// A proxier that was built on kube-proxy's trackers keeps its names and shape.
func Example_comingFromKubeProxy() {
	services, err := tracker.NewServiceChangeTracker(tracker.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	endpoints, err := tracker.NewEndpointsChangeTracker(tracker.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	p := &proxier{services: services, endpoints: endpoints, node: tracker.NodeInfo{Name: "node-1"}, sync: func() {}}

	web := service("ns", "web", "10.96.0.1")
	p.OnServiceAdd(web)
	p.OnEndpointSliceAdd(with(slice("ns", "web-abcde", "web"), "10.0.0.1"))
	p.syncProxyRules()
	p.OnEndpointSliceUpdate(nil, with(slice("ns", "web-abcde", "web"), "10.0.0.1", "10.0.0.2"))
	p.syncProxyRules()
	p.OnServiceDelete(web)
	p.syncProxyRules()
	// Output:
	// changed: 1 services, endpoints of 1
	// ns/web:http/TCP/IPv4 10.96.0.1:80/TCP leads to [10.0.0.1:8080]
	// changed: 0 services, endpoints of 1
	// ns/web:http/TCP/IPv4 10.96.0.1:80/TCP leads to [10.0.0.1:8080 10.0.0.2:8080]
	// changed: 1 services, endpoints of 0
}
