package conformance

import (
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testtime"
	"github.com/go-proxier/proxier/tracker"
)

// changeWorlds are about what changes leave undisturbed.
func changeWorlds() []world {
	return []world{
		{name: "changes under load", run: func(w *World) {
			w.set(
				service{name: "steady", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), endpoints: on("pod1", "remote1")},
				service{name: "moving", number: 2, ports: tcpAndUDP(0), endpoints: on("pod1", "pod2", "remote1")})
			w.Sync()
			var to []Target
			for _, f := range w.Env.Families {
				for _, t := range []target{clusterIP(1, 80), clusterIP(2, 80), atPrimary(30080)} {
					for _, p := range []v1.Protocol{tcp, udp} {
						to = append(to, Target{t.at(f), p})
					}
				}
			}
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
		}},

		{name: "established connections", run: func(w *World) {
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
					if err := c.echo(time.Now().Add(testtime.Timeout)); err != nil && must(c) {
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

			// Connections to the endpoint that goes are its own affair.
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
		}},

		{name: "full resync", run: func(w *World) {
			rows := overUDP(
				row{from: "client1", to: clusterIP(1, 80), want: "pod1* remote1*"},
				row{from: "client1", to: atPrimary(30080), want: "pod1"},
				row{from: "pod3", to: externalIP(1, 80), want: "pod1 remote1"},
				row{from: "pod3", to: clusterIP(2, 80), want: "pod2"},
				row{from: "pod3", to: clusterIP(3, 80), want: "drop"},
				row{from: "client1", to: atPrimary(30081), want: "pass"},
			)
			w.set(
				service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalLocal: true, externalIPs: true, endpoints: on("pod1", "remote1")},
				service{name: "other", number: 2, ports: tcpAndUDP(0), endpoints: on("pod2")},
				service{name: "gone", number: 3, kind: "NodePort", ports: tcpAndUDP(30081), endpoints: on("pod2")})
			w.Sync()
			w.remove("gone")
			w.Cursor.Resync()
			w.Sync()
			w.check(rows...)
			w.Cursor.Resync()
			w.Sync()
			w.check(rows...)
		}},

		{name: "restart", needs: []Feature{Restart}, run: func(w *World) {
			w.set(
				service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), endpoints: on("pod1", "remote1")},
				service{name: "gone", number: 2, kind: "NodePort", ports: tcpAndUDP(30081), endpoints: on("pod2")},
				service{name: "changed", number: 3, ports: tcpAndUDP(0), endpoints: on("pod2", "remote2")})
			w.Sync()
			var to []Target
			for _, f := range w.Env.Families {
				to = append(to,
					Target{clusterIP(1, 80).at(f), tcp},
					Target{clusterIP(3, 80).at(f), udp},
					Target{atPrimary(30080).at(f), tcp})
			}
			w.undisturbed(to, func() {
				// What happens while the agent is away.
				w.Cursor.Detach()
				w.remove("gone")
				w.change("changed", func(s *service) { s.endpoints = on("pod3", "remote2") })
				w.attach()
				w.Sync()
			})
			w.check(overUDP(
				row{from: "client1", to: clusterIP(1, 80), want: "pod1* remote1*"},
				row{from: "client1", to: atPrimary(30080), want: "pod1* remote1*"},
				row{from: "client1", to: atPrimary(30081), want: "pass"},
				row{from: "pod1", to: clusterIP(2, 80), want: "drop"},
				row{from: "pod1", to: clusterIP(3, 80), want: "pod3 remote2"},
			)...)
			w.remove("web")
			w.Sync()
			w.check(overUDP(row{from: "client1", to: atPrimary(30080), want: "pass"})...)
		}},
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
