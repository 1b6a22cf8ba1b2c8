package metrics

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TrafficConfig is the configuration of [Set.WatchTraffic]. Read and Endpoints are required.
type TrafficConfig struct {
	// Read reads the counters, such as a backend's method Traffic. If it fails, the metrics
	// are left out.
	Read func(context.Context) (*dataplane.Traffic, error)
	// Endpoints returns the number of endpoints that new connections of a Service port can
	// go to.
	Endpoints func(tracker.Key) int
	// All, if not nil, returns every Service port. Those without traffic then have series with 0,
	// so that rate sees the first refusal. In each address family they fill the rest of Limit in
	// the order of their keys. If there are more, the series of "(other)" starts with 0, too.
	All func() []tracker.Key
	// Limit is the most Service ports with their own series in each address family. 0 means
	// [DefaultTrafficLimit].
	Limit int
}

// DefaultTrafficLimit is the default of TrafficConfig.Limit.
const DefaultTrafficLimit = 1000

// trafficTimeout bounds how long a scrape waits for the counters. A backend cannot read them
// while it applies a delta.
const trafficTimeout = 5 * time.Second

// otherServices is the label service of the series that all other Service ports share.
const otherServices = "(other)"

// trafficCounter is one of the exported counters.
type trafficCounter struct {
	known dataplane.CounterSet
	desc  *prometheus.Desc
	value func(dataplane.Counters) uint64
}

// traffic exports the traffic of each Service port. Each scrape reads the counters.
type traffic struct {
	TrafficConfig
	counters  []trafficCounter
	endpoints *prometheus.Desc

	mu sync.Mutex
	// families holds the state of the last scrape by address family.
	families map[tracker.Family]*familyTraffic
}

// familyTraffic records which Service ports of a family have their own series. A Service
// port keeps its series, or its place among the others, as long as it is counted: a counter
// that moved from one series to another would look like traffic.
type familyTraffic struct {
	own map[tracker.Key]bool
	// others holds the last counters of the Service ports without their own series. rest is
	// the sum of what any of these ports counted.
	others map[tracker.Key]dataplane.Counters
	rest   dataplane.Counters
}

// WatchTraffic exports the traffic of each Service port as counters, as far as the backend
// counts it: proxier_service_connections_total, _packets_total, _bytes_total,
// _refused_packets_total and _dropped_packets_total. It also exports the gauge
// proxier_service_endpoints. Labels are service_namespace, service, port, protocol and
// ip_family. Service ports beyond the limit share series with the service "(other)". A
// scrape assigns it the new Service ports with the least traffic. WatchTraffic must be
// called at most once.
func (s *Set) WatchTraffic(c TrafficConfig) {
	if c.Limit == 0 {
		c.Limit = DefaultTrafficLimit
	}
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("proxier_service_"+name, help, []string{"service_namespace", "service", "port", "protocol", familyLabel}, nil)
	}
	t := &traffic{TrafficConfig: c, families: map[tracker.Family]*familyTraffic{}, counters: []trafficCounter{
		{dataplane.CountsConnections, desc("connections_total", "Connections that were sent to an endpoint of the Service port"), func(c dataplane.Counters) uint64 { return c.Connections }},
		{dataplane.CountsPackets, desc("packets_total", "Packets of the Service port's connections in both directions"), func(c dataplane.Counters) uint64 { return c.Packets }},
		{dataplane.CountsBytes, desc("bytes_total", "Bytes of the Service port's connections in both directions"), func(c dataplane.Counters) uint64 { return c.Bytes }},
		{dataplane.CountsRefused, desc("refused_packets_total", "First packets of connections that were refused because the Service port had no endpoints"), func(c dataplane.Counters) uint64 { return c.Refused }},
		{dataplane.CountsDropped, desc("dropped_packets_total", "First packets of connections that were dropped because of their source, or because the Service port had no endpoints on this node"), func(c dataplane.Counters) uint64 { return c.Dropped }},
	}, endpoints: desc("endpoints", "Endpoints that new connections of the Service port can go to")}
	s.registry.MustRegister(collector(t.collect))
}

func (t *traffic) collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), trafficTimeout)
	defer cancel()
	t.mu.Lock()
	defer t.mu.Unlock()
	read, err := t.Read(ctx)
	if err != nil {
		return // an error here would suppress all other metrics
	}
	idle := map[tracker.Family][]tracker.Key{} // not counted
	if t.All != nil {
		for _, k := range t.All() {
			if _, ok := read.Services[k]; !ok {
				idle[k.Family] = append(idle[k.Family], k)
			}
		}
	}
	export := func(c dataplane.Counters, labels ...string) {
		for _, m := range t.counters {
			if read.Known.Has(m.known) {
				out <- prometheus.MustNewConstMetric(m.desc, prometheus.CounterValue, float64(m.value(c)), labels...)
			}
		}
	}
	for _, family := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		f := t.families[family]
		if f == nil {
			f = &familyTraffic{own: map[tracker.Key]bool{}, others: map[tracker.Key]dataplane.Counters{}}
			t.families[family] = f
		}
		f.update(read.Services, family, t.Limit)
		shown := idle[family]
		if free := t.Limit - len(f.own); len(shown) > free {
			slices.SortFunc(shown, tracker.Key.Compare)
			shown = shown[:free]
		}
		for _, k := range append(slices.Collect(maps.Keys(f.own)), shown...) {
			labels := []string{k.Namespace, k.Name, k.Port, string(k.Protocol), family.String()}
			export(read.Services[k], labels...)
			out <- prometheus.MustNewConstMetric(t.endpoints, prometheus.GaugeValue, float64(t.Endpoints(k)), labels...)
		}
		if f.rest != (dataplane.Counters{}) || len(shown) < len(idle[family]) {
			export(f.rest, "", otherServices, "", "", family.String())
		}
	}
}

// update stores new counters.
func (f *familyTraffic) update(services map[tracker.Key]dataplane.Counters, family tracker.Family, limit int) {
	gone := func(k tracker.Key) bool { _, ok := services[k]; return !ok }
	maps.DeleteFunc(f.own, func(k tracker.Key, _ bool) bool { return gone(k) })
	maps.DeleteFunc(f.others, func(k tracker.Key, _ dataplane.Counters) bool { return gone(k) })
	var fresh []tracker.Key
	for k, now := range services {
		if k.Family != family || f.own[k] {
			continue
		}
		if last, ok := f.others[k]; ok {
			f.addRest(k, last, now)
		} else {
			fresh = append(fresh, k)
		}
	}
	slices.SortFunc(fresh, func(a, b tracker.Key) int {
		return cmp.Or(cmp.Compare(services[b].Connections, services[a].Connections), a.Compare(b))
	})
	for _, k := range fresh {
		if len(f.own) < limit {
			f.own[k] = true
		} else {
			f.addRest(k, dataplane.Counters{}, services[k])
		}
	}
}

// addRest adds the increase of one port's counters to the sum of the others.
func (f *familyTraffic) addRest(k tracker.Key, last, now dataplane.Counters) {
	since := func(last, now uint64) uint64 {
		if now < last {
			return now // the counter was reset
		}
		return now - last
	}
	f.rest.Add(dataplane.Counters{
		Connections: since(last.Connections, now.Connections), Packets: since(last.Packets, now.Packets),
		Bytes: since(last.Bytes, now.Bytes), Refused: since(last.Refused, now.Refused), Dropped: since(last.Dropped, now.Dropped),
	})
	f.others[k] = now
}
