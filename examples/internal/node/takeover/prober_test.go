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

	"github.com/go-proxier/proxier/internal/testing/must"
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
	// The port of a client that stays connected: no other socket gets it, and no process listens there.
	client := must.Get(net.Dial("tcp", serve("", "")))(t)
	t.Cleanup(func() { client.Close() })
	closed := client.LocalAddr().String()
	const health = `{"lastUpdated": "x","currentTime": "y", "nodeEligible": true}`
	unknown := []Kind{{KubeProxy, ""}}
	for name, tt := range map[string]struct {
		metrics, healthz string
		runs             bool
		want             []Kind
	}{
		"nothing":                {closed, closed, false, nil},
		"another program":        {serve("", "hello"), serve("", "ok"), false, nil},
		"kube-proxy":             {serve("", "iptables"), serve("", health), true, []Kind{{KubeProxy, "iptables"}}},
		"kube-proxy's metrics":   {serve("", "nftables\n"), closed, true, []Kind{{KubeProxy, "nftables"}}},
		"kube-proxy's /healthz":  {closed, serve("", health), false, unknown},
		"kube-proxy's process":   {closed, closed, true, unknown},
		"another nodeproxy":      {serve("other", "ipvs"), serve("other", health), true, []Kind{{Nodeproxy, "ipvs"}}},
		"itself":                 {serve("own", "ipvs"), serve("own", health), false, nil},
		"itself, and kube-proxy": {serve("", "nftables"), serve("own", health), false, []Kind{{KubeProxy, "nftables"}}},
		"itself, and a process":  {serve("own", "nftables"), serve("own", health), true, unknown},
	} {
		p := Prober{Own: "own", Pages: []string{tt.metrics + "/proxyMode", tt.healthz + "/healthz"}, Runs: func() bool { return tt.runs }}
		if got := p.Look(t.Context()); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}

func TestPagesOfTheOwnConfigurationAreAsked(t *testing.T) {
	local := func(port, path string) []string { return []string{"127.0.0.1:" + port + path, "[::1]:" + port + path} }
	for own, want := range map[string][]string{
		"":                  nil,
		"127.0.0.1:10249":   nil,
		"0.0.0.0:10249":     nil,
		"127.0.0.1:20249":   local("20249", "/proxyMode"),
		"[::]:20249":        local("20249", "/proxyMode"),
		"192.0.2.1:10249":   {"192.0.2.1:10249/proxyMode"},
		"[2001:db8::1]:999": append(local("999", "/proxyMode"), "[2001:db8::1]:999/proxyMode"),
	} {
		want = slices.Concat(want, local("10249", "/proxyMode"), local("10256", "/healthz"))
		slices.Sort(want)
		if got := Pages(own, "127.0.0.1:10256"); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", own, got, want)
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
	p := Prober{Pages: []string{strings.TrimPrefix(s.URL, "http://") + "/proxyMode"}}
	want := []Kind{{KubeProxy, "nftables"}}
	for range 3 {
		if got := p.Look(t.Context()); !slices.Equal(got, want) {
			t.Errorf("silent %v: %v, want %v", silent.Load(), got, want)
		}
		silent.Store(true)
	}
}

// TestAnswersOfOthersDoNotCount asks a server that does not belong to root.
func TestAnswersOfOthersDoNotCount(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "iptables") }))
	defer s.Close()
	at := strings.TrimPrefix(s.URL, "http://")
	for _, trusted := range []bool{true, false} {
		p := Prober{Pages: []string{at + "/proxyMode"}, Trusted: func(addr string) bool { return trusted && addr == at }}
		if got := p.Look(t.Context()); (len(got) == 1) != trusted {
			t.Errorf("trusted %t: %v", trusted, got)
		}
	}
}
