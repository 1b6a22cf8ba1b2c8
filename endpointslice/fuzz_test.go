package endpointslice_test

import (
	"encoding/json"
	"reflect"
	"testing"

	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
)

// FuzzSet sets any decodable slice in a cache with a valid slice of the same Service.
// Set must not panic and must not modify the object. Setting the object again must
// not be a change, and the cache must be empty after both are deleted.
func FuzzSet(f *testing.F) {
	for _, seed := range []string{
		`{"metadata":{"namespace":"ns","name":"s","labels":{"kubernetes.io/service-name":"svc"}},"addressType":"IPv4",
		  "ports":[{"name":"http","port":80},{"name":"http","port":81,"protocol":"TCP"},{"port":3},{"name":"","port":70000}],
		  "endpoints":[{"addresses":["10.0.0.1","10.0.0.2"],"conditions":{"ready":false},"nodeName":"n","zone":"z","hints":{"forZones":[{"name":"b"},{"name":"a"}],"forNodes":[{"name":"n"}]}},
		               {"addresses":["10.0.0.1"],"conditions":{"terminating":true}},{"addresses":[]},{"addresses":["fd00::1"]}]}`,
		`{"metadata":{"namespace":"ns","name":"s","labels":{"kubernetes.io/service-name":"svc"}},"addressType":"IPv6",
		  "ports":[{"name":"","port":53,"protocol":"UDP"}],"endpoints":[{"addresses":["::ffff:10.0.0.01"]},{"addresses":["fd00::010.0.0.1"]}]}`,
		`{"metadata":{"namespace":"ns","name":"s"},"addressType":"FQDN"}`,
		`null`, `{}`,
	} {
		f.Add([]byte(seed))
	}
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		var s *discovery.EndpointSlice
		if json.Unmarshal(data, &s) != nil {
			return
		}
		c, _ := newCache()
		sound := slice("sound", "svc", ep("10.0.0.1"), ep("10.0.0.9"))
		c.Set(sound)
		c.Take()
		before := s.DeepCopy()
		c.Set(s)
		if !reflect.DeepEqual(s, before) {
			t.Fatal("the object was modified")
		}
		for _, change := range c.Take() {
			portsState(t, change.New)
		}
		if c.Set(s) || len(c.Take()) > 0 {
			t.Fatal("setting the same object again counts as a change")
		}
		c.Delete(named("sound"))
		if s != nil {
			gone := *s
			gone.Endpoints = nil
			c.Set(&gone)
		}
		c.Take()
		for range c.All() {
			t.Fatal("the cache is not empty")
		}
	})
}
