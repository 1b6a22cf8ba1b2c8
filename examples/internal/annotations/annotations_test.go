package annotations

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/tracker"
)

func TestServiceAnnotationsSetTheHash(t *testing.T) {
	for _, c := range []struct {
		balance, slots string
		hash           tracker.Hash
		want           uint16
		warnings       int
	}{
		{"", "", tracker.HashNone, 0, 0},
		{"random", "", tracker.HashNone, 0, 0},
		{"source", "1000", tracker.HashSource, 1000, 0},
		{"source-port", "65535", tracker.HashSourcePort, 65535, 0},
		{"Source", "65536", tracker.HashNone, 0, 2},
		{"source", "0", tracker.HashSource, 0, 1},
		{"source", "-1", tracker.HashSource, 0, 1},
		{"source", "many", tracker.HashSource, 0, 1},
	} {
		var log bytes.Buffer
		s := &v1.Service{}
		s.Annotations = map[string]string{Balance: c.balance}
		if c.slots != "" {
			s.Annotations[Slots] = c.slots
		}
		p := &tracker.ServicePort{}
		if err := (&Reader{Log: slog.New(slog.NewTextHandler(&log, nil))}).OnService(s, nil, p); err != nil {
			t.Fatal(err)
		}
		if p.Hash != c.hash || p.HashBuckets != c.want {
			t.Errorf("%q, %q: %v, %d slots", c.balance, c.slots, p.Hash, p.HashBuckets)
		}
		if n := strings.Count(log.String(), "annotation is ignored"); n != c.warnings {
			t.Errorf("%q, %q: %d warnings:\n%s", c.balance, c.slots, n, log.String())
		}
	}
}

func TestSliceAnnotationsSetWeights(t *testing.T) {
	for _, c := range []struct {
		weight, weights string
		want            [2]uint16 // of 10.244.1.7 and fd00::1
		warnings        int
	}{
		{"", "", [2]uint16{1, 1}, 0},
		{"5", "", [2]uint16{5, 5}, 0},
		{"5", "10.244.1.7=0", [2]uint16{0, 5}, 0},
		{"", "fd00:0::1 = 65535, 10.244.1.9=2,", [2]uint16{1, 65535}, 0},
		{"x", "10.244.1.7=3", [2]uint16{3, 1}, 1},
		{"-1", "10.244.1.7=3,nonsense,fd00::1=70000", [2]uint16{3, 1}, 2},
	} {
		var log bytes.Buffer
		r := &Reader{Log: slog.New(slog.NewTextHandler(&log, nil))}
		s := &discovery.EndpointSlice{}
		s.Annotations = map[string]string{Weights: c.weights}
		if c.weight != "" {
			s.Annotations[Weight] = c.weight
		}
		s.Endpoints = make([]discovery.Endpoint, 2)
		for i, a := range []string{"10.244.1.7", "fd00::1"} {
			e := &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), 80), Weight: 1}
			if err := r.OnEndpoint(s, &s.Endpoints[i], e); err != nil {
				t.Fatal(err)
			}
			if e.Weight != c.want[i] {
				t.Errorf("%q, %q: %s has weight %d, want %d", c.weight, c.weights, a, e.Weight, c.want[i])
			}
		}
		if n := strings.Count(log.String(), "annotation is ignored"); n != c.warnings {
			t.Errorf("%q, %q: %d warnings:\n%s", c.weight, c.weights, n, log.String())
		}
	}
}

// TestChangedWeightsAreRead reads several slices with one reader, starting at any endpoint,
// and the same object with changed annotations.
func TestChangedWeightsAreRead(t *testing.T) {
	r := &Reader{Log: slog.New(slog.DiscardHandler)}
	s := &discovery.EndpointSlice{Endpoints: make([]discovery.Endpoint, 2)}
	for i, c := range []struct {
		weights string
		want    [2]uint16
	}{
		{"10.0.0.0=3", [2]uint16{3, 1}},
		{"10.0.0.1=4", [2]uint16{1, 4}},
		{"", [2]uint16{1, 1}},
		{"10.0.0.1=4", [2]uint16{1, 4}},
		{"10.0.0.1=4,10.0.0.1=5,::ffff:10.0.0.0=9", [2]uint16{9, 5}},
	} {
		s.Annotations = map[string]string{Weights: c.weights}
		for _, at := range [][]int{{0, 1}, {1, 0}, {1}}[i%3] {
			e := &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(at)}), 80), Weight: 1}
			if err := r.OnEndpoint(s, &s.Endpoints[at], e); err != nil {
				t.Fatal(err)
			}
			if e.Weight != c.want[at] {
				t.Errorf("%q: %s has weight %d, want %d", c.weights, e, e.Weight, c.want[at])
			}
		}
	}
}
