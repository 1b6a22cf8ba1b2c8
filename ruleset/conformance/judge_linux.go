package conformance

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// concurrentChecks is the number of connections that a world checks concurrently.
// Most of the time it waits for replies that must not arrive.
const concurrentChecks = 16

// check syncs the backend and makes the connections of the rows in every family. It compares the results
// with Trace, and the backend's counters with both. If a connection fails, the world
// ends, because later failures would mostly be the same.
func (w *World) check(rows ...row) {
	w.tb.Helper()
	w.Sync()
	snapshot := w.Engine.Snapshot()
	w.made = tally{}
	before := w.traffic()
	var wg sync.WaitGroup
	var failures atomic.Int32
	limit := make(chan struct{}, concurrentChecks)
	// An ICMP error reaches every raw socket between the two addresses, so probe SCTP
	// one at a time.
	var raw sync.Mutex
	one := func(from host, r row, f tracker.Family) {
		if r.proto == sctp {
			raw.Lock()
			defer raw.Unlock()
		}
		if failures.Load() >= enough {
			return
		}
		if err := w.judge(snapshot, from, r, f); err != nil {
			failures.Add(1)
			w.tb.Errorf("%s from %s (%s) to %s (%s): %v", r.proto, from.name, from.addr(f), r.to.name, r.to.at(f), err)
		}
	}
	for _, r := range rows {
		for from := range strings.FieldsSeq(r.from) {
			for _, f := range w.Env.Families {
				if !r.to.at(f).IsValid() {
					continue
				}
				limit <- struct{}{}
				wg.Go(func() {
					defer func() { <-limit }()
					one(w.net.hosts[from], r, f)
				})
			}
		}
	}
	wg.Wait()
	if failures.Load() != 0 {
		w.tb.FailNow()
	}
	if err := w.made.compare(before, w.traffic()); err != nil {
		w.tb.Fatal(err)
	}
}

// judge makes the connections of one row from one host in one family.
func (w *World) judge(s *ruleset.Snapshot, from host, r row, f tracker.Family) error {
	to := r.to.at(f)
	p := w.packet(from.origin, r.proto, to)
	v := s.Trace(p)
	if err := w.unexpected(v, f, r.want); err != nil {
		return err
	}
	if !w.judges(s, v, p) {
		return nil
	}
	timeout, silence := w.timeout(), cmp.Or(w.options.silence, silence)
	complain := func(o outcome, want string) error {
		return fmt.Errorf("%s, must %s: %s", o, want, v.Rule)
	}
	wrongError := func(o outcome) bool { return o.notSent && !v.MayFailSend && w.does(LocalErrors) }
	if v.Action != ruleset.ActionForward && v.Port != nil && !w.does(Refuse) {
		if o := from.probe(w.tb.Context(), r.proto, to, silence); o.Kind == netlab.Reached {
			return complain(o, "not reach an endpoint")
		}
		return nil
	}
	switch v.Action {
	case ruleset.ActionReject:
		if o := w.probe(from, r.proto, to, timeout); o.Kind != netlab.Refused || wrongError(o) {
			return complain(o, "be refused")
		}
		w.made.note(v)
	case ruleset.ActionDrop:
		begun := time.Now()
		o := w.probe(from, r.proto, to, silence)
		if o.Kind == netlab.Silent && from.stalls.Since(begun) {
			o = w.probe(from, r.proto, to, 4*silence) // the time may have ended before the packet was sent
		}
		refuses := o.Kind == netlab.Refused && w.mayRefuse(v, p)
		if o.Kind != netlab.Silent && !refuses || wrongError(o) {
			return complain(o, "get no answer")
		}
		if refuses {
			v.Action = ruleset.ActionReject // the backend counts it as refused
		}
		w.made.note(v)
	case ruleset.ActionPass:
		want := w.unhandled(from, to)
		wait := timeout
		if want.Kind == netlab.Silent {
			wait = silence
		}
		if o := w.probe(from, r.proto, to, wait); o.Kind != want.Kind || o.Server != want.Server || o.Source != want.Source {
			return complain(o, fmt.Sprintf("pass (%s)", want))
		}
	case ruleset.ActionForward:
		return w.judgeForward(from, p, v)
	}
	return nil
}

// probe makes one connection, as the host's probe does, and passes the result to Options.Observe.
func (w *World) probe(from host, proto v1.Protocol, to netip.AddrPort, wait time.Duration) outcome {
	o := from.probe(w.tb.Context(), proto, to, wait)
	if w.options.Observe == nil {
		return o
	}
	p := w.packet(from.origin, proto, to)
	switch o.Kind {
	case netlab.Reached:
		w.options.Observe(w, p, Outcome{Action: ruleset.ActionForward, Endpoints: []Choice{{Addr: o.Server, Masquerade: o.Source != p.From}}})
	case netlab.Refused:
		w.options.Observe(w, p, Outcome{Action: ruleset.ActionReject})
	case netlab.Silent:
		w.options.Observe(w, p, Outcome{Action: ruleset.ActionDrop})
	}
	return o
}

// judgeForward connects until every endpoint was reached. The probability that 30n
// connections miss one of n equally used endpoints is e^-30. With weights, n is the
// total weight divided by the least weight.
func (w *World) judgeForward(from host, p ruleset.Packet, v ruleset.Verdict) error {
	n := len(addressesOf(v))
	sum, least := w.totalWeight(v)
	fixed := v.Affinity != 0 || v.Hash == tracker.HashSource && w.does(ConsistentHash)
	seen := map[netip.AddrPort]int{}
	var last netip.AddrPort
	moves := -1
	for i := 0; i < 30*((sum+least-1)/least) && (len(seen) < n || i < n+2); i++ {
		// A round-robin backend may be in step with several hosts, each of which then
		// always gets the same endpoint.
		if i > 3*n {
			time.Sleep(rand.N(time.Millisecond))
		}
		o := w.probe(from, p.Protocol, p.To, w.timeout())
		ep, err := w.permitted(o, p, v)
		if err != nil {
			return fmt.Errorf("%w: %s", err, v.Rule)
		}
		w.made.note(v)
		at := ep.Addr
		seen[at]++
		if at != last {
			last, moves = at, moves+1
		}
		// A client with a fixed endpoint sees no other one.
		if fixed && i == n+1 {
			break
		}
	}
	// A client that is moved must not return to its previous endpoint.
	if fixed && moves != 0 && (moves != len(seen)-1 || !w.mayMove(v)) {
		return fmt.Errorf("client affinity or a hash of the source, but connections went to %d endpoints (%s)", len(seen), counts(seen))
	}
	if !fixed && len(seen) != n {
		return fmt.Errorf("of %d endpoints only %d were ever used (%s): %s", n, len(seen), counts(seen), v.Rule)
	}
	return nil
}

// mayMove reports whether an earlier change of other endpoints may move a client that
// has a fixed endpoint.
func (w *World) mayMove(v ruleset.Verdict) bool {
	if v.Affinity == 0 {
		return !w.does(HashOfEndpoints)
	}
	f := v.Frontend
	internal := f.ShortCircuit() && f.Internal != f.Target && slices.Equal(v.Endpoints, v.Port.Pool(f.Internal))
	return internal && !w.does(AffinityInternal)
}

// permitted returns the endpoint that was reached, or an error if it must not be.
func (w *World) permitted(o outcome, p ruleset.Packet, v ruleset.Verdict) (*tracker.Endpoint, error) {
	switch {
	case o.Kind == netlab.Silent:
		return nil, fmt.Errorf("%s, must be forwarded (%w)", o, o.Err)
	case o.Kind != netlab.Reached:
		return nil, fmt.Errorf("%s, must be forwarded", o)
	}
	i := slices.IndexFunc(v.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == o.Server })
	if i < 0 {
		return nil, fmt.Errorf("%s, which is not among the endpoints allowed (%v)", o, v.Endpoints)
	}
	ep := v.Endpoints[i]
	if !w.does(Masquerade) {
		return ep, nil
	}
	if !w.does(SourceAddress) || w.options.masquerades(p, v, ep) {
		if !slices.Contains(w.nodeAddresses(tracker.FamilyOf(p.From)), o.Source) {
			return nil, fmt.Errorf("%s, which must be masqueraded to an address of the node", o)
		}
	} else if o.Source != p.From {
		return nil, fmt.Errorf("%s, must keep its source %s", o, p.From)
	}
	return ep, nil
}

func counts(seen map[netip.AddrPort]int) string {
	var b []string
	for _, a := range slices.SortedFunc(maps.Keys(seen), netip.AddrPort.Compare) {
		b = append(b, fmt.Sprintf("%s %dx", a, seen[a]))
	}
	return strings.Join(b, ", ")
}

// unhandled returns the expected outcome for a packet that is not for a Service.
func (w *World) unhandled(from host, to netip.AddrPort) netlab.Outcome {
	f := tracker.FamilyOf(to.Addr())
	if to.Addr().IsLoopback() && from.in != "" {
		return netlab.Outcome{Kind: netlab.Silent} // the kernel drops it
	}
	if to.Addr().IsLoopback() || slices.Contains(w.nodeAddresses(f), to.Addr()) {
		if to.Port() == nodePortOwn {
			return netlab.Outcome{Kind: netlab.Reached, Server: to, Source: from.addr(f)}
		}
		return netlab.Outcome{Kind: netlab.Refused}
	}
	if w.podAt(f, to.Addr()) != "" {
		return netlab.Outcome{Kind: netlab.Reached, Server: to, Source: from.addr(f)}
	}
	// The default route leads to a host that drops the packet.
	return netlab.Outcome{Kind: netlab.Silent}
}
