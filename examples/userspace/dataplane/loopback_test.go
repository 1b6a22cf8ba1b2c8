package dataplane

import (
	"errors"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestServesRestrictsFrontends serves the NodePort of a Service and not its cluster IP.
func TestServesRestrictsFrontends(t *testing.T) {
	t.Parallel()
	port := freePort(t, "tcp")
	w := newNodePort(t, Config{Serves: func(f *ruleset.Frontend, _ v1.Protocol, _ netip.AddrPort) bool { return f.Kind == ruleset.KindNodePort }}, port)
	w.sync()
	w.connect(port)
	b := w.backend
	if b.Stats().Sockets != 1 || b.Sockets(tracker.IPv4) != 1 || b.Sockets(tracker.IPv6) != 0 || !b.Listens(netip.AddrPortFrom(localhost, port), tcp) {
		t.Errorf("%+v, %d and %d sockets", b.Stats(), b.Sockets(tracker.IPv4), b.Sockets(tracker.IPv6))
	}
}

// sockets is an Allowance.
type sockets struct{ room int }

func (s *sockets) Take() bool {
	if s.room == 0 {
		return false
	}
	s.room--
	return true
}

func (s *sockets) Give() { s.room++ }

// TestSocketsAreLimited has room for one socket, which the first Service keeps.
func TestSocketsAreLimited(t *testing.T) {
	t.Parallel()
	w, first, second := newWorld(t, Config{Sockets: &sockets{room: 1}}), freePort(t, "tcp"), freePort(t, "tcp")
	w.service("first", tcp, first)
	w.endpoints("first", tcp, serveTCP(t, "first"))
	w.sync()
	w.service("second", tcp, second)
	w.endpoints("second", tcp, serveTCP(t, "second"))
	for range 2 {
		err := w.cursor.Sync(t.Context())
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(err, ErrTooManySockets) {
			t.Fatalf("error %v", err)
		}
		w.connect(first)
	}
	w.endpoints("first", tcp)
	w.sync()
	if c := w.connect(second); c.name != "second" {
		t.Errorf("reached %q", c.name)
	}
}

// TestOldestServicesGetSockets has more Services than sockets when the process starts. The first two
// are the oldest, whatever their names.
func TestOldestServicesGetSockets(t *testing.T) {
	t.Parallel()
	w, ports := newWorld(t, Config{Sockets: &sockets{room: 2}}), map[string]uint16{}
	for name, created := range map[string]int64{"a": 0, "b": 400, "c": 200, "d": 300, "e": 500} {
		ports[name] = freePort(t, "tcp")
		w.created = created
		w.service(name, tcp, ports[name])
		w.endpoints(name, tcp, serveTCP(t, name))
	}
	var partial *ruleset.PartialError
	if err := w.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 3 {
		t.Fatalf("error %v", err)
	}
	for _, name := range []string{"c", "d"} {
		if c := w.connect(ports[name]); c.name != name {
			t.Errorf("%s is answered by %q", name, c.name)
		}
	}
}
