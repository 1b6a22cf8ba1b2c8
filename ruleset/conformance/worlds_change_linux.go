package conformance

import (
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/tracker"
)

// changePacketWorlds returns worlds about connections that changes must not disturb.
func changePacketWorlds() []world {
	return []world{
		{name: "changes under load", run: packets(func(w *World) {
			w.set(
				service{name: "steady", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), endpoints: on("pod1", "remote1")},
				service{name: "moving", number: 2, ports: tcpAndUDP(0), endpoints: on("pod1", "pod2", "remote1")})
			w.Sync()
			to := w.targets([]v1.Protocol{tcp, udp}, clusterIP(1, 80), clusterIP(2, 80), atPrimary(30080))
			w.undisturbed(to, func() {
				pods := []string{"pod1", "pod2", "pod3", "remote1", "remote2", "remote3"}
				start := time.Now()
				for i := 0; i < 60 || time.Since(start) < 2*time.Second; i++ {
					switch {
					case i%20 == 19:
						w.Cursor.Resync()
					case i%10 == 4:
						w.set(service{name: "passing", number: 3, ports: tcpAndUDP(30090), kind: "NodePort", endpoints: on("pod3")})
					case i%10 == 9:
						w.remove("passing")
					default:
						w.change("moving", func(s *service) { s.endpoints = on(pods[i%4 : i%4+1+i%3]...) })
					}
					w.Sync()
				}
			})
		})},

		{name: "frontends that move", run: packets(func(w *World) {
			// An external IP and a NodePort move from one Service to the next, along
			// a row and in a circle, with all Services present and with some deleted.
			names := []string{"a", "b", "c"}
			has := func(i int, owns bool) service {
				s := service{name: names[i], number: 1 + i, ports: tcpAndUDP(0), endpoints: on([]string{"pod1", "pod2", "remote1"}[i])}
				if owns {
					s.kind, s.ports, s.externalIPs = "NodePort", tcpAndUDP(30080), true
					s.externalNumber = 1
				}
				return s
			}
			w.set(has(0, true), has(1, false), has(2, false))
			w.Sync()
			to := w.targets([]v1.Protocol{tcp, udp}, externalIP(1, 80), atPrimary(30080))
			w.undisturbed(to, func() {
				start := time.Now()
				for i := 0; i < 30 || time.Since(start) < 2*time.Second; i++ {
					from, next := i%3, (i+1)%3
					if i%5 == 4 {
						w.remove(names[from])
					} else {
						w.set(has(from, false))
					}
					w.set(has(next, true))
					w.Sync()
				}
			})
		})},

		{name: "established connections", run: packets(func(w *World) {
			w.set(
				service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), endpoints: on("pod1", "pod2", "remote1")},
				service{name: "other", number: 2, ports: tcpAndUDP(0), endpoints: on("pod2", "remote2")})
			w.Sync()
			var open []*connection
			for _, f := range w.Env.Families {
				for _, from := range []string{"client1", "pod3", "node"} {
					for range 6 {
						open = append(open,
							w.open(from, clusterIP(1, 80).at(f)),
							w.open(from, atPrimary(30080).at(f)),
							w.open(from, clusterIP(2, 80).at(f)))
					}
				}
			}
			live := func(after string, must func(*connection) bool) {
				w.tb.Helper()
				for _, c := range open {
					// The others may get no answer, and each would take the whole timeout.
					if !must(c) {
						continue
					}
					if err := c.Echo(time.Now().Add(testtime.Timeout)); err != nil {
						w.tb.Errorf("connection from %s to %s, served by %s, broke after %s: %v", c.from, c.to, c.server, after, err)
					}
				}
			}
			all := func(*connection) bool { return true }
			live("nothing", all)

			w.Cursor.Resync()
			w.Sync()
			live("a full resync", all)

			w.change("web", func(s *service) { s.endpoints = on("pod1", "pod2", "pod3", "remote1") })
			w.Sync()
			live("an endpoint was added", all)

			// Connections to the removed endpoint are not checked.
			w.change("web", func(s *service) { s.endpoints = on("pod1", "pod3", "remote1") })
			w.Sync()
			live("an endpoint was removed", func(c *connection) bool {
				gone := c.server.Addr() == podAddr(tracker.FamilyOf(c.server.Addr()), 2)
				return !gone || c.to == clusterIP(2, 80).at(tracker.FamilyOf(c.to.Addr()))
			})

			w.remove("web")
			w.Sync()
			live("another service was removed", func(c *connection) bool {
				return c.to == clusterIP(2, 80).at(tracker.FamilyOf(c.to.Addr()))
			})
		})},
	}
}

// undisturbed fails the test if a connection fails while f runs.
func (w *World) undisturbed(to []Target, f func()) {
	w.tb.Helper()
	c := w.Churn(to, f)
	for i, err := range c.Failures {
		if i == 10 {
			w.tb.Errorf("and %d more", len(c.Failures)-i)
			break
		}
		w.tb.Error(err)
	}
	w.tb.Logf("%d connections, %d failed", c.Opened, len(c.Failures))
}
