//go:build linux

package wholeagent

import (
	"fmt"
	"net/http"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// scriptedKubeProxy writes the rules of the Service web as a kube-proxy does: a sync adds what
// is missing, replaces what differs, and leaves the rest of its tables. It runs for IPv4 only.
type scriptedKubeProxy struct {
	t      *testing.T
	node   *netlab.Host
	mode   string
	closed []func()
	mu     sync.Mutex
}

// startKubeProxy starts a kube-proxy on a node, with endpoints of the Service web. With ports, it
// serves its health check and its mode.
func startKubeProxy(t *testing.T, node *netlab.Host, mode string, ports bool, ips ...string) *scriptedKubeProxy {
	t.Helper()
	p := &scriptedKubeProxy{t: t, node: node, mode: mode}
	if ports {
		p.serve("127.0.0.1:10249", p.mode)
		p.serve("0.0.0.0:10256", `{"lastUpdated":"2026-11-23T12:00:00Z","currentTime":"2026-11-23T12:00:00Z","nodeEligible":true}`)
	}
	p.sync(ips...)
	p.t.Cleanup(p.stop)
	return p
}

// serve answers every request at an address, except that kube-proxy has no /readyz.
func (p *scriptedKubeProxy) serve(addr, text string) {
	p.t.Helper()
	l := must.Get(p.node.Listen("tcp", addr))(p.t)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, text)
	})}
	go s.Serve(l)
	p.closed = append(p.closed, func() { s.Close() })
}

// stop ends kube-proxy. Its rules stay.
func (p *scriptedKubeProxy) stop() {
	for _, f := range p.closed {
		f()
	}
	p.closed = nil
}

// sync brings the rules up to date.
func (p *scriptedKubeProxy) sync(ips ...string) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if out, err := p.node.Run(p.t, "sh", append([]string{"testdata/kubeproxy-" + p.mode + ".sh"}, ips...)...); err != nil {
		p.t.Fatalf("sync in mode %s with %q: %v\n%s", p.mode, ips, err, out)
	}
}
