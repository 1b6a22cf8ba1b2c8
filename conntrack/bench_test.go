package conntrack

import (
	"fmt"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// BenchmarkRecord measures Record of one changed endpoint of a UDP Service, beside few and
// many other Services.
func BenchmarkRecord(b *testing.B) {
	for _, services := range []int{1, 10000} {
		for _, endpoints := range []int{10, 1000} {
			b.Run(fmt.Sprintf("services=%d/endpoints=%d", services, endpoints), func(b *testing.B) {
				node := everyAddress()
				p := newStaleFlows(tracker.IPv4)
				var s service
				for i := range services {
					s = service{name: fmt.Sprint("s", i), cluster: fmt.Sprintf("10.96.%d.%d:53", i>>8, i&255)}
					if i == services-1 {
						for e := range endpoints {
							s.endpoints = append(s.endpoints, ep(fmt.Sprintf("10.0.%d.%d:53", e>>8, e&255), ""))
						}
					}
					ch := change(nil, s.compile(node))
					p.record(&ch)
				}
				p.clear()
				all := s.compile(node)
				s.endpoints = s.endpoints[1:]
				less := change(all, s.compile(node))
				more := change(less.New, all)
				b.ReportAllocs()
				for b.Loop() {
					p.record(&less)
					p.record(&more)
					p.clear()
				}
			})
		}
	}
}

// BenchmarkJudge measures the cost of one flow without its decoding.
func BenchmarkJudge(b *testing.B) {
	p := newStaleFlows(tracker.IPv4)
	ch := change(nil, dns("10.0.0.1:53", "10.0.0.2:53"))
	p.record(&ch)
	stale := p.judge(&p.queue, nil)
	for name, f := range map[string]Flow{
		"valid": toOne, "stale": flow("10.9.0.1:1", "10.96.0.1:53", "10.0.0.9:53"),
		"other": flow("10.9.0.1:1", "198.51.100.1:443", "198.51.100.1:443"),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if stale(&f) != (name == "stale") {
					b.Fatal("wrong")
				}
			}
		})
	}
}
