package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// memory is what steps of a script remember.
type memory struct {
	clients map[client]netip.AddrPort
	held    *Held
	other   *play
}

// client is an external client, or the flow of one from a port, with the number of a target.
type client struct {
	family         tracker.Family
	number, target int
}

func (c client) String() string { return fmt.Sprintf("client%d (%s)", c.number, c.family) }

func (l *connections) step(s *play, word, rest string, below []line) error {
	rest, why, _ := strings.Cut(rest, "=")
	rest, why = strings.TrimSpace(rest), strings.TrimSpace(why)
	switch word {
	case "undisturbed":
		aims, err := parseAims(rest)
		if err != nil || len(below) == 0 {
			return cmp.Or(err, errNoSteps)
		}
		l.undisturbed(l.targets(aims), func() { s.run(below) })
	case "other":
		if l.other == nil {
			w := newWorld(l.tb, l.options, l.config)
			l.other = &play{w, s.file, s.values, s.blocks}
		}
		l.other.lab().clients = l.clients
		step, rest, _ := strings.Cut(rest, " ")
		if why != "" {
			rest += "=" + why
		}
		return l.other.do(step, rest, below)
	case "remember", "same", "used":
		return l.compareClients(s, word, rest, why)
	case "hold":
		hosts, to, ok := strings.Cut(rest, "->")
		if !ok {
			hosts, to = "client1 pod1", rest
		}
		aims, err := parseAims(to)
		if err != nil {
			return err
		}
		l.held = l.hold(strings.Fields(hosts), 2*heldEach, l.targets(aims))
	case "held":
		return l.stillHeld(rest, why)
	case "wait":
		d, err := time.ParseDuration(rest)
		time.Sleep(d)
		return err
	case "expire":
		seconds, to, _ := strings.Cut(rest, " ")
		n, err := number(seconds)
		aims, err2 := parseAims(to)
		if err := cmp.Or(err, err2); err != nil {
			return err
		}
		l.Sync()
		l.expire(aims[0], time.Duration(n)*time.Second)
	case "distribution":
		aims, err := parseAims(rest)
		if err != nil {
			return err
		}
		return l.distribution(aims[0], why)
	default:
		return fmt.Errorf("no step %q", word)
	}
	return nil
}

// targets returns the targets in every family, over each protocol that the backend supports.
func (l *connections) targets(aims []aim) (out []Target) {
	for _, f := range l.Env.Families {
		for _, a := range aims {
			if a.proto != udp || l.does(UDP) {
				out = append(out, Target{a.at(f), a.proto})
			}
		}
	}
	return out
}

// undisturbed fails the test if a connection fails while f runs.
func (l *connections) undisturbed(to []Target, f func()) {
	l.tb.Helper()
	c := l.Churn(to, f)
	for i, err := range c.Failures {
		if i == 10 {
			l.tb.Errorf("and %d more", len(c.Failures)-i)
			break
		}
		l.tb.Error(err)
	}
	l.tb.Logf("%d connections, %d failed", c.Opened, len(c.Failures))
}

// stillHeld checks open connections: all, or with a why behind = those to some targets that a pod does not serve.
func (l *connections) stillHeld(rest, why string) error {
	except, to, ok := "", rest, why != ""
	if more, cut := strings.CutPrefix(rest, "except "); ok && cut {
		except, to, _ = strings.Cut(more, " ")
	}
	var some Held
	var targets []Target
	if ok {
		aims, err := parseAims(to)
		if err != nil {
			return err
		}
		targets = l.targets(aims)
	} else {
		why = rest
	}
	for _, c := range l.held.connections {
		if (!ok || slices.ContainsFunc(targets, func(t Target) bool { return t.Addr == c.to })) && (except == "" || l.podAt(c.server.Addr()) != except) {
			some.connections = append(some.connections, c)
		}
	}
	if some.Len() == 0 {
		return errors.New("no connection is held")
	}
	if err := some.Check(); err != nil {
		l.tb.Errorf("%s: %v", why, err)
	}
	return nil
}

// compareClients connects clients to targets. It remembers the endpoints that they reach, of which the first one becomes
// $used, compares them with those remembered, or checks how many there are.
func (l *connections) compareClients(s *play, word, text, why string) error {
	var except string
	var percent, port int
	percentOf := func(s string) (n int, err error) { return strconv.Atoi(strings.TrimSuffix(s, "%")) }
	words := strings.Fields(text)
	var err error
	if word == "used" {
		var least int
		if len(words) == 2 {
			percent, err = percentOf(words[1])
		} else {
			percent = 100
		}
		if err == nil && len(words) != 0 {
			least, err = number(words[0])
		}
		l.used(least, percent)
		return err
	}
	for len(words) > 2 && err == nil && slices.Contains([]string{"except", "but", "from"}, words[0]) {
		switch words[0] {
		case "except":
			except = words[1]
		case "but":
			percent, err = percentOf(words[1])
		case "from":
			port, err = number(words[1])
		}
		words = words[2:]
	}
	if err != nil {
		return err
	}
	aims, err := parseAims(strings.Join(words, " "))
	if err != nil {
		return err
	}
	now := l.chosen(aims, port)
	if word == "remember" {
		l.clients, s.values["used"] = now, l.podAt(now[client{l.Env.Families[0], 1, 0}].Addr())
		return nil
	}
	if l.clients == nil {
		return errors.New("same needs a step remember before it")
	}
	moved := 0
	for c, ep := range l.clients {
		switch gone := except != "" && l.podAt(ep.Addr()) == except; {
		case gone && now[c] == ep:
			l.tb.Errorf("%s is still sent to %s %s", c, ep, why)
		case !gone && now[c] != ep:
			if moved++; moved > len(l.clients)*percent/100 {
				l.tb.Errorf("%s was moved from %s to %s %s", c, ep, now[c], why)
			}
		}
	}
	return nil
}

// used checks that the clients remembered reached a number of endpoints at each target, and that none was reached by
// too many.
func (l *connections) used(least, percent int) {
	type group struct {
		family tracker.Family
		target int
	}
	all := map[group]map[netip.AddrPort]int{}
	total := map[group]int{}
	for c, ep := range l.clients {
		g := group{c.family, c.target}
		if all[g] == nil {
			all[g] = map[netip.AddrPort]int{}
		}
		all[g][ep]++
		total[g]++
	}
	for g, seen := range all {
		if most := slices.Max(slices.Collect(maps.Values(seen))); len(seen) < least || most > total[g]*percent/100 {
			l.tb.Errorf("%s: %d clients reached %d endpoints, at least %d expected, and at most %d %% at one (%s)", g.family, total[g], len(seen), least, percent, counts(seen))
		}
	}
}

// flows is the number of flows that are compared with one another.
const flows = 200

// chosen syncs the backend, connects every client once to each target and returns the endpoint that
// each reached. If port is not 0, it sends datagrams of the first client from that port on instead.
func (l *connections) chosen(aims []aim, port int) map[client]netip.AddrPort {
	l.tb.Helper()
	l.Sync()
	out := map[client]netip.AddrPort{}
	for i, a := range aims {
		if a.proto == udp && !l.does(UDP) {
			continue
		}
		for _, f := range l.Env.Families {
			last := l.config.clients
			if port != 0 {
				last = flows
			}
			for n := 1; n <= last; n++ {
				c := client{f, n, i}
				var o outcome
				if port == 0 {
					from := fmt.Sprint("client", n)
					o = l.probe(l.net.hosts[from], l.packet(from, a.proto, a.at(f)), l.timeout())
				} else {
					ctx, cancel := context.WithTimeout(l.tb.Context(), l.timeout())
					o = outcomeOf(l.net.hosts["client1"].probeUDP(ctx, uint16(port+n), a.at(f)))
					cancel()
				}
				if o.Kind != netlab.Reached {
					l.tb.Fatalf("from %s to %s (%s): %s", c, a, a.at(f), o)
				}
				out[c] = o.Server
			}
		}
	}
	return out
}

// expire checks that clients keep their endpoint until their affinity times out.
func (l *connections) expire(a aim, timeout time.Duration) {
	l.tb.Helper()
	var mu sync.Mutex
	moved, checked := map[tracker.Family]bool{}, map[tracker.Family]int{}
	var wait sync.WaitGroup
	for _, f := range l.Env.Families {
		for i := 1; i <= l.config.clients; i++ {
			wait.Go(func() {
				ok, elsewhere := l.outlive(client{f, i, 0}, a.at(f), timeout)
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
	for _, f := range l.Env.Families {
		switch n := checked[f]; {
		case n == 0:
			l.tb.Errorf("%s: not checked: the machine was too busy for any of %d clients to return within the timeout of %s", f, l.config.clients, timeout)
		case n != l.config.clients:
			l.tb.Logf("%s: %d of %d clients were not checked: the machine was too busy for them to return within the timeout of %s", f, l.config.clients-n, l.config.clients, timeout)
		}
		if !moved[f] {
			l.tb.Errorf("%s: after the timeout of %s every client still has its endpoint", f, timeout)
		}
	}
}

// sure is the margin by which a measured time must differ from a timeout to be certain also for the kernel's clock,
// which ticks.
const sure = 250 * time.Millisecond

// affinityTries bounds the attempts of a client to return in time twice in a row.
const affinityTries = 8

// outlive makes a client return shortly before its affinity times out, until these times add up to more than the
// timeout. The client must keep its endpoint. Then it makes the client return shortly after the timeout. moved
// reports whether the client got another endpoint then, which it may. judged reports whether it returned in time
// twice in a row, so that a move would have been detected.
func (l *connections) outlive(c client, to netip.AddrPort, timeout time.Duration) (judged, moved bool) {
	type visit struct {
		server     netip.AddrPort
		begun, end time.Time
	}
	connect := func() (visit, bool) {
		v := visit{begun: time.Now()}
		o := l.net.hosts[fmt.Sprint("client", c.number)].probe(l.tb.Context(), tcp, to, l.timeout())
		time.Sleep(l.options.delay)
		v.server, v.end = o.Server, time.Now()
		if o.Kind != netlab.Reached {
			l.tb.Errorf("from %s to %s: %s", c, to, o)
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
			l.tb.Errorf("%s was moved from %s to %s before its affinity timeout: %s after its last connection", c, last.server, now.server, at.Round(time.Millisecond))
			return true, false
		}
		judged = kept == 2
		last = now
	}
	time.Sleep(timeout + sure)
	now, ok := connect()
	return judged, ok && now.server != last.server
}

// unlikely is the probability below which an outcome is a failure. A run of the suite
// checks about a dozen outcomes.
const unlikely = 1e-10

// distribution sends many requests in each family, over UDP if the backend supports it, and compares their
// distribution with the weights of pods, each with =N or 1, by Pearson's chi-squared test. It fails if the outcome is
// unlikely, and stops early if it is ordinary. The number of pods must be odd.
func (l *connections) distribution(a aim, text string) error {
	l.tb.Helper()
	const requests, step, ordinary = 2000, 500, 0.3
	weights := map[string]int{}
	for word := range strings.FieldsSeq(text) {
		pod, weight, _ := strings.Cut(word, "/")
		n, err := number(cmp.Or(weight, "1"))
		if err := cmp.Or(err, l.host(pod)); err != nil {
			return err
		}
		weights[pod] = n
	}
	l.Sync()
	for _, f := range l.Env.Families {
		seen := map[netip.AddrPort]int{}
		for sent := step; sent <= requests; sent += step {
			if err := l.requests(a.at(f), step, seen); err != nil {
				return err
			}
			p, err := l.likelihood(seen, sent, weights)
			switch {
			case err != nil:
				return err
			case p < unlikely:
				return fmt.Errorf("the distribution of %d requests over %d endpoints does not match their weights: %s (probability %.1g)", sent, len(weights), counts(seen), p)
			}
			if p > ordinary {
				break
			}
		}
	}
	return nil
}

func (l *connections) requests(to netip.AddrPort, n int, seen map[netip.AddrPort]int) (err error) {
	const workers = 4
	proto := udp
	if !l.does(UDP) {
		proto = tcp
	}
	p := l.packet("client1", proto, to)
	var (
		mu sync.Mutex
		wg sync.WaitGroup
	)
	for range workers {
		wg.Go(func() {
			for range n / workers {
				o := l.probe(l.net.hosts["client1"], p, l.timeout())
				mu.Lock()
				if o.Kind == netlab.Reached {
					seen[o.Server]++
				} else {
					err = fmt.Errorf("%s: %s", to, o)
				}
				failed := err != nil
				mu.Unlock()
				if failed {
					return
				}
			}
		})
	}
	wg.Wait()
	return err
}

// likelihood returns the probability of a distribution of requests that matches the weights no
// better than the given one.
func (l *connections) likelihood(seen map[netip.AddrPort]int, requests int, weights map[string]int) (float64, error) {
	sum := 0
	for _, weight := range weights {
		sum += weight
	}
	chi2 := float64(requests)
	for ep, got := range seen {
		weight := weights[l.podAt(ep.Addr())]
		if weight == 0 {
			return 0, fmt.Errorf("%d requests went to %s, which must have none", got, ep)
		}
		want := float64(requests) * float64(weight) / float64(sum)
		// The first value of chi2 is the sum of all wants, of which an endpoint without
		// requests contributes its own.
		chi2 += (float64(got)-want)*(float64(got)-want)/want - want
	}
	// With an even number 2k of degrees of freedom, a value above x has the
	// probability e^(-x/2) * sum of (x/2)^i/i! for i < k.
	p, term := 0.0, math.Exp(-chi2/2)
	for i := 0; i < (len(weights)-1)/2; i++ {
		p += term
		term *= chi2 / 2 / float64(i+1)
	}
	return p, nil
}
