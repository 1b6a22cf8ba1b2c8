package conformance

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// sixPods are the endpoints of most Services whose clients stay with an endpoint.
const sixPods = "pod1,pod2,pod3,remote1,remote2,remote3"

// affinityPacketWorlds returns worlds about clients under sessionAffinity ClientIP.
func affinityPacketWorlds() []world {
	c := config{clients: affinityClients}
	need := []Feature{Affinity}
	return []world{
		{name: "affinity expires", needs: []Feature{Affinity, AffinityTimeout}, config: c, run: packets(func(w *World) {
			const timeout = 2 * time.Second
			runScript(w, fmt.Sprintf("set web cluster=1 affinity=%d endpoints=%s", timeout/time.Second, sixPods))
			w.Sync()
			var mu sync.Mutex
			moved, checked := map[tracker.Family]bool{}, map[tracker.Family]int{}
			var wait sync.WaitGroup
			for _, f := range w.Env.Families {
				for i := 1; i <= affinityClients; i++ {
					wait.Go(func() {
						ok, elsewhere := w.outlive(client{f, i}, clusterIP(1, 80), timeout)
						mu.Lock()
						defer mu.Unlock()
						if ok {
							checked[f]++
						}
						moved[f] = moved[f] || elsewhere
					})
				}
			}
			wait.Wait()
			for _, f := range w.Env.Families {
				switch n := checked[f]; {
				case n == 0:
					w.tb.Errorf("%s: not checked: the machine was too busy for any of %d clients to return within the timeout of %s", f, affinityClients, timeout)
				case n != affinityClients:
					w.tb.Logf("%s: %d of %d clients were not checked: the machine was too busy for them to return within the timeout of %s", f, affinityClients-n, affinityClients, timeout)
				}
				if !moved[f] {
					w.tb.Errorf("%s: after the timeout of %s every client still has its endpoint", f, timeout)
				}
			}
		})},

		{name: "affinity", needs: need, config: c, run: packets(func(w *World) {
			runScript(w, `
				set web cluster=1 type=NodePort ports=80:30080 external=1 affinity=10800 endpoints=`+sixPods+`
				set other cluster=2 endpoints=pod1,remote1`)
			for _, to := range []target{clusterIP(1, 80), atPrimary(30080), externalIP(1, 80)} {
				for _, p := range w.protocols() {
					before := w.chosen(p, to)
					for range 4 {
						w.same("for no reason", before, w.chosen(p, to))
					}
					for _, f := range w.Env.Families {
						if used(f, before) == 1 {
							w.tb.Errorf("%s: %d clients were all sent to the same of 6 endpoints", f, affinityClients)
						}
					}
				}
			}
			runScript(w, "check client1 pod3 pod1 node -> external1:80 = pod1* pod2* pod3* remote1* remote2* remote3*")

			// Changes of another Service, and a full resync.
			to := clusterIP(1, 80)
			before := w.chosen(tcp, to)
			runScript(w, "change other endpoints=pod2")
			w.same("though only another service changed", before, w.chosen(tcp, to))
			w.remove("other")
			w.same("though only another service was removed", before, w.chosen(tcp, to))
			w.Cursor.Resync()
			w.same("by a full resync", before, w.chosen(tcp, to))

			// An endpoint is removed: its clients move once; the others stay.
			gone := before[client{w.Env.Families[0], 1}].Addr()
			var rest []string
			for _, p := range w.net.pods {
				if p.addr(w.Env.Families[0]) != gone {
					rest = append(rest, p.Name)
				}
			}
			runScript(w, "change web endpoints="+strings.Join(rest, ","))
			moved := w.chosen(tcp, to)
			for c, ep := range before {
				left := false
				for _, p := range w.net.pods {
					left = left || p.addr(c.family) == ep.Addr() && slices.Contains(rest, p.Name)
				}
				if left && moved[c] != ep {
					w.tb.Errorf("%s was moved from %s to %s when another endpoint was removed", c, ep, moved[c])
				}
				if !left && moved[c] == ep {
					w.tb.Errorf("%s is still sent to %s, which was removed", c, ep)
				}
			}
			for range 2 {
				w.same("after it had moved", moved, w.chosen(tcp, to))
			}
			// The endpoint is added again: no client has a reason to move.
			runScript(w, "change web endpoints="+sixPods)
			w.same("when an endpoint was added", moved, w.chosen(tcp, to))
		})},
	}
}

// sure is the margin by which a measured time must differ from a timeout to be
// certain also for the kernel's clock, which ticks.
const sure = 250 * time.Millisecond

// affinityTries bounds the attempts of a client to return in time twice in a row.
const affinityTries = 8

// outlive makes a client return shortly before its affinity times out, counted from
// its previous connection, until these times add up to more than the timeout. The
// client must keep its endpoint. Then it makes the client return shortly after the
// timeout. moved reports whether the client got another endpoint then, which it may.
// A client that returns too late because the machine is busy need not keep its
// endpoint. judged reports whether it returned in time twice in a row, so that a move
// would have been detected.
func (w *World) outlive(c client, to target, timeout time.Duration) (judged, moved bool) {
	type visit struct {
		server     netip.AddrPort
		begun, end time.Time
	}
	connect := func() (visit, bool) {
		v := visit{begun: time.Now()}
		o := w.net.hosts[fmt.Sprint("client", c.number)].probe(w.tb.Context(), v1.ProtocolTCP, to.at(c.family), w.timeout())
		time.Sleep(w.options.delay)
		v.server, v.end = o.Server, time.Now()
		if o.Kind != netlab.Reached {
			w.tb.Errorf("from %s to %s: %s", c, to.name, o)
		}
		return v, o.Kind == netlab.Reached
	}
	last, ok := connect()
	for kept, tries := 0, 0; ok && !judged && tries < affinityTries; tries++ {
		time.Sleep(timeout - sure - 200*time.Millisecond)
		var now visit
		if now, ok = connect(); !ok {
			return false, false
		}
		kept++
		if at := now.end.Sub(last.begun); at >= timeout-sure {
			kept = 0
		} else if now.server != last.server {
			w.tb.Errorf("%s was moved from %s to %s before its affinity timeout: %s after its last connection", c, last.server, now.server, at.Round(time.Millisecond))
			return true, false
		}
		judged = kept == 2
		last = now
	}
	time.Sleep(timeout + sure)
	now, ok := connect()
	return judged, ok && now.server != last.server
}

// chosen syncs the backend, connects every client once and returns the endpoint that
// each reached.
func (w *World) chosen(p v1.Protocol, to target) map[client]netip.AddrPort {
	w.tb.Helper()
	w.Sync()
	out := map[client]netip.AddrPort{}
	for _, f := range w.Env.Families {
		for i := 1; i <= affinityClients; i++ {
			c := client{f, i}
			o := w.probe(w.net.hosts[fmt.Sprint("client", i)], p, to.at(f), w.timeout())
			if o.Kind != netlab.Reached {
				w.tb.Fatalf("%s from %s to %s (%s): %s", p, c, to.name, to.at(f), o)
			}
			out[c] = o.Server
		}
	}
	return out
}

// used returns the number of endpoints that clients of a family reached.
func used(f tracker.Family, chosen map[client]netip.AddrPort) int {
	out := map[netip.AddrPort]bool{}
	for c, ep := range chosen {
		if c.family == f {
			out[ep] = true
		}
	}
	return len(out)
}

// same fails the test if a client reached another endpoint than before.
func (w *World) same(why string, before, now map[client]netip.AddrPort) {
	w.tb.Helper()
	for c, ep := range before {
		if now[c] != ep {
			w.tb.Errorf("%s was moved from %s to %s %s", c, ep, now[c], why)
		}
	}
}
