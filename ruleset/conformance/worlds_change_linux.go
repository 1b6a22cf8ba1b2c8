package conformance

import (
	"fmt"
	"strings"
	"time"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/tracker"
)

// changePacketWorlds returns worlds about connections that changes must not disturb.
func changePacketWorlds() []world {
	return []world{
		{name: "changes under load", run: packets(func(w *World) {
			runScript(w, `
				set steady cluster=1 type=NodePort ports=80:30080 endpoints=pod1,remote1
				set moving cluster=2 endpoints=pod1,pod2,remote1
				sync`)
			w.undisturbed(w.targets([]aim{{both, clusterIP(1, 80)}, {both, clusterIP(2, 80)}, {both, atPrimary(30080)}}), func() {
				pods := strings.Split(sixPods, ",")
				start := time.Now()
				for i := 0; i < 60 || time.Since(start) < 2*time.Second; i++ {
					switch {
					case i%20 == 19:
						w.Cursor.Resync()
					case i%10 == 4:
						runScript(w, "set passing cluster=3 type=NodePort ports=80:30090 endpoints=pod3")
					case i%10 == 9:
						w.remove("passing")
					default:
						runScript(w, "change moving endpoints="+strings.Join(pods[i%4:i%4+1+i%3], ","))
					}
					w.Sync()
				}
			})
		})},

		{name: "frontends that move", run: packets(func(w *World) {
			// An external IP and a NodePort move from one Service to the next, along
			// a row and in a circle, with all Services present and with some deleted.
			set := func(i int, owns bool) {
				more := ""
				if owns {
					more = " type=NodePort ports=80:30080 external=1"
				}
				runScript(w, fmt.Sprintf("set %c cluster=%d endpoints=%s%s", 'a'+i, 1+i, []string{"pod1", "pod2", "remote1"}[i], more))
			}
			set(0, true)
			set(1, false)
			set(2, false)
			w.Sync()
			w.undisturbed(w.targets([]aim{{both, externalIP(1, 80)}, {both, atPrimary(30080)}}), func() {
				start := time.Now()
				for i := 0; i < 30 || time.Since(start) < 2*time.Second; i++ {
					from, next := i%3, (i+1)%3
					if i%5 == 4 {
						w.remove(string(rune('a' + from)))
					} else {
						set(from, false)
					}
					set(next, true)
					w.Sync()
				}
			})
		})},

		{name: "established connections", run: packets(establishedConnections)},
	}
}

// establishedConnections checks that changes break no connection to an endpoint that stays.
func establishedConnections(w *World) {
	runScript(w, `
		set web cluster=1 type=NodePort ports=80:30080 endpoints=pod1,pod2,remote1
		set other cluster=2 endpoints=pod2,remote2
		sync`)
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

	runScript(w, "resync\nsync")
	live("a full resync", all)

	runScript(w, "change web endpoints=pod1,pod2,pod3,remote1\nsync")
	live("an endpoint was added", all)

	// Connections to the removed endpoint are not checked.
	runScript(w, "change web endpoints=pod1,pod3,remote1\nsync")
	live("an endpoint was removed", func(c *connection) bool {
		gone := c.server.Addr() == podAddr(tracker.FamilyOf(c.server.Addr()), 2)
		return !gone || c.to == clusterIP(2, 80).at(tracker.FamilyOf(c.to.Addr()))
	})

	runScript(w, "remove web\nsync")
	live("another service was removed", func(c *connection) bool {
		return c.to == clusterIP(2, 80).at(tracker.FamilyOf(c.to.Addr()))
	})
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
