package metrics

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestTrafficSeriesAreLimited reads growing counters of more Service ports than the limit.
func TestTrafficSeriesAreLimited(t *testing.T) {
	key := func(name string) tracker.Key {
		return tracker.Key{ServicePortName: tracker.ServicePortName{
			NamespacedName: types.NamespacedName{Namespace: "ns", Name: name}, Port: "p", Protocol: v1.ProtocolTCP,
		}, Family: tracker.IPv4}
	}
	services := map[tracker.Key]dataplane.Counters{}
	var failure error
	s := newSet("nftables")
	s.WatchTraffic(TrafficConfig{
		Limit: 2,
		Read: func(context.Context) (*dataplane.Traffic, error) {
			return &dataplane.Traffic{Known: dataplane.CountsConnections | dataplane.CountsRefused, Services: services}, failure
		},
		Endpoints: func(k tracker.Key) int { return len(k.Name) },
	})
	const connections = "proxier_service_connections_total"
	check := func(what string, want map[string]float64) {
		t.Helper()
		got := map[string]float64{}
		if f := families(t, s)[connections]; f != nil {
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if l.GetName() == "service" {
						got[l.GetValue()] = m.GetCounter().GetValue()
					}
				}
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	check("nothing", nil)
	for i, name := range []string{"a", "bb", "c", "d"} {
		services[key(name)] = dataplane.Counters{Connections: uint64(10 + i), Refused: 1}
	}
	check("the first reading", map[string]float64{"d": 13, "c": 12, otherServices: 21})
	services[key("a")] = dataplane.Counters{Connections: 1000}
	services[key("c")] = dataplane.Counters{Connections: 20}
	check("another port has the most traffic", map[string]float64{"d": 13, "c": 20, otherServices: 1011})
	delete(services, key("a"))
	check("one of the others is deleted", map[string]float64{"d": 13, "c": 20, otherServices: 1011})
	services[key("bb")] = dataplane.Counters{Connections: 2}
	check("a counter is reset", map[string]float64{"d": 13, "c": 20, otherServices: 1013})
	delete(services, key("d"))
	services[key("e")] = dataplane.Counters{Connections: 1}
	check("a new port takes a free place", map[string]float64{"e": 1, "c": 20, otherServices: 1013})

	if n := value(t, s, "proxier_service_endpoints", "ip_family=IPv4,port=p,protocol=TCP,service=e,service_namespace=ns"); n != 1 {
		t.Errorf("%v endpoints", n)
	}
	for _, name := range []string{"packets", "bytes", "dropped_packets"} {
		if families(t, s)["proxier_service_"+name+"_total"] != nil {
			t.Errorf("%s are exported, but the backend does not count them", name)
		}
	}
	failure = errors.New("no kernel")
	check("an error", nil)
	if families(t, s)["kubeproxy_sync_proxy_rules_last_timestamp_seconds"] == nil {
		t.Error("an error suppresses other metrics")
	}
}

// TestIdleServicesHaveSeries checks that series start with 0 before any traffic. If there are more
// Service ports than the limit, the first ones have a series, and the others share one.
func TestIdleServicesHaveSeries(t *testing.T) {
	counted := map[tracker.Key]dataplane.Counters{}
	var all []tracker.Key
	s := newSet("nftables")
	s.WatchTraffic(TrafficConfig{
		Read: func(context.Context) (*dataplane.Traffic, error) {
			return &dataplane.Traffic{Known: dataplane.CountsConnections | dataplane.CountsRefused, Services: counted}, nil
		},
		Endpoints: func(tracker.Key) int { return 0 },
		All:       func() []tracker.Key { return slices.Clone(all) },
		Limit:     2,
	})
	key := func(name string) tracker.Key {
		k := tracker.Key{Family: tracker.IPv4}
		k.Namespace, k.Name, k.Protocol = "ns", name, "TCP"
		return k
	}
	refuse := func(name string) { counted[key(name)] = dataplane.Counters{Refused: counted[key(name)].Refused + 1} }
	check := func(what, want string) {
		t.Helper()
		got := map[string]float64{}
		for _, m := range families(t, s)["proxier_service_refused_packets_total"].GetMetric() {
			for _, l := range m.GetLabel() {
				if l.GetName() == "service" {
					got[l.GetValue()] = m.GetCounter().GetValue()
				}
			}
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%s: %v, want %s", what, got, want)
		}
	}
	check("no Service", "map[]")
	all = []tracker.Key{key("b"), key("a")}
	check("as many as the limit", "map[a:0 b:0]")
	all = []tracker.Key{key("c"), key("b"), key("d"), key("a")}
	check("more than the limit", "map[(other):0 a:0 b:0]")
	refuse("b")
	check("the first refusal", "map[(other):0 a:0 b:1]")
	refuse("d")
	check("a refusal of one without a series", "map[(other):0 b:1 d:1]")
	refuse("a")
	check("a refusal of one more than the limit", "map[(other):1 b:1 d:1]")
	delete(counted, key("d"))
	all = []tracker.Key{key("c"), key("b"), key("a")}
	check("one with a series is deleted", "map[(other):1 b:1 c:0]")
}
