package takeover

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

// TestProberTellsProxiesApart asks servers of kube-proxy, of nodeproxy, of this process and of
// other programs.
func TestProberTellsProxiesApart(t *testing.T) {
	serve := func(instance, body string) string {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if instance != "" {
				w.Header().Set(InstanceHeader, instance)
			}
			fmt.Fprint(w, body)
		}))
		t.Cleanup(s.Close)
		return strings.TrimPrefix(s.URL, "http://")
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := free.Addr().String()
	free.Close()
	const health = `{"lastUpdated": "x","currentTime": "y", "nodeEligible": true}`
	for name, tt := range map[string]struct {
		metrics, healthz string
		want             []Kind
	}{
		"nothing":                {closed, closed, nil},
		"another program":        {serve("", "hello"), serve("", "ok"), nil},
		"kube-proxy":             {serve("", "iptables"), serve("", health), []Kind{{KubeProxy, "iptables"}}},
		"kube-proxy's metrics":   {serve("", "nftables\n"), closed, []Kind{{KubeProxy, "nftables"}}},
		"kube-proxy's /healthz":  {closed, serve("", health), []Kind{{KubeProxy, "iptables"}, {KubeProxy, "ipvs"}, {KubeProxy, "nftables"}}},
		"another nodeproxy":      {serve("other", "ipvs"), serve("other", health), []Kind{{Nodeproxy, "ipvs"}}},
		"itself":                 {serve("own", "ipvs"), serve("own", health), nil},
		"itself, and kube-proxy": {serve("", "nftables"), serve("own", health), []Kind{{KubeProxy, "nftables"}}},
	} {
		p := Prober{Own: "own", Metrics: []string{tt.metrics}, Healthz: []string{tt.healthz}}
		if got := p.Look(t.Context()); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

// TestSilentProxyKeepsItsLastAnswer asks a server that stops answering, but keeps its port.
func TestSilentProxyKeepsItsLastAnswer(t *testing.T) {
	var silent atomic.Bool
	done := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if silent.Load() {
			<-done
		}
		fmt.Fprint(w, "nftables")
	}))
	defer s.Close()
	defer close(done)
	p := Prober{Metrics: []string{strings.TrimPrefix(s.URL, "http://")}}
	want := []Kind{{KubeProxy, "nftables"}}
	for range 3 {
		if got := p.Look(t.Context()); !slices.Equal(got, want) {
			t.Errorf("silent %v: %v, want %v", silent.Load(), got, want)
		}
		silent.Store(true)
	}
}
