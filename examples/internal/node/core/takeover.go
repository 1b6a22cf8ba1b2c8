package core

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// lookInterval is the time between two looks for proxies that run, and rulesInterval the time between
// two looks at their rules while they do.
const (
	lookInterval  = time.Second
	rulesInterval = 15 * time.Second
)

// takeOver waits for a kube-proxy whose rules have the names of the agent's own, and then removes the
// rules of other proxies: of kube-proxy, if adopt is set, and of nodeproxy's other modes. It removes them
// when their owner has ended and the rules of the agent's mode are in effect, and ends when there are
// none.
type takeOver struct {
	a     *Agent
	mode  modes.Mode
	adopt bool
	// fresh reports that the agent is to take over from kube-proxy but had no rules when it
	// started: the node is new, or was booted.
	fresh bool
	// marking reports that markers are kept.
	marking atomic.Bool
	prober  *takeover.Prober
	// moved reports that mode iptables has the clients of kube-proxy's nftables mode.
	moved bool
	// changed is when objects last changed after the first lists, in Unix nanoseconds, and notices
	// counts these changes and the lists.
	changed, notices atomic.Int64

	kinds map[takeover.Kind]*otherRules
	// rules are those that the kernel had at readAt.
	rules  map[takeover.Kind]uint64
	readAt time.Time
}

// otherRules is what takeOver knows of the rules of one kind.
type otherRules struct {
	takeover.Watch
	// state is the one that was reported last.
	state string
	// next is the earliest time of the next attempt at a removal.
	next time.Time
}

func newTakeOver(a *Agent) *takeOver {
	o, e := &a.options, a.options.Config.Effective
	t := &takeOver{
		a: a, mode: a.mode, adopt: o.Config.Adopt && !o.Foreign, kinds: map[takeover.Kind]*otherRules{},
		prober: &takeover.Prober{
			Own: a.instance, Pages: takeover.Pages(e.MetricsBindAddress, e.HealthzBindAddress),
			Dial: o.Dial, Runs: takeover.KubeProxyRuns, Trusted: takeover.ListenerIsRoots,
		},
	}
	for _, m := range o.Modes {
		t.kinds[takeover.Kind{Owner: takeover.KubeProxy, Mode: m.Name}] = &otherRules{}
		if m.Name != a.mode.Name {
			t.kinds[takeover.Kind{Owner: takeover.Nodeproxy, Mode: m.Name}] = &otherRules{}
		}
	}
	return t
}

const unknownClients = "cannot keep the endpoints of clients of kube-proxy: some may get others"

// rememberedClients returns a function that returns the clients that kube-proxy remembers for an
// endpoint. It reads them once, at its first call. The agent's own memory, if there is any, is in
// the table that the agent keeps.
func rememberedClients(netns *os.File, log *slog.Logger) func(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration {
	read := sync.OnceValue(func() *takeover.Clients { return readClients(netns, log) })
	return func(k tracker.Key, endpoint netip.AddrPort) map[netip.Addr]time.Duration {
		return read().Of(k, endpoint)
	}
}

// readClients returns what could be read, and logs the errors of the rest.
func readClients(netns *os.File, log *slog.Logger) *takeover.Clients {
	c, err := takeover.ReadClients(context.Background(), netns)
	if err != nil {
		log.Warn(unknownClients, "error", err)
	}
	return c
}

// applyWithClients applies a delta. In mode iptables it gives the endpoints the clients that they
// have in kube-proxy's nftables mode, with the first full delta. The kernel has a list of clients
// only while a rule refers to it, so the clients are written when the rules are in effect.
func (t *takeOver) applyWithClients(ctx context.Context, d *ruleset.Delta, apply func(context.Context, *ruleset.Delta) error) error {
	if !d.Full || t.moved || !t.adopt || t.mode.Name != config.ModeIPTables {
		return apply(ctx, d)
	}
	clients := readClients(t.a.netns, t.a.options.Log)
	err := apply(ctx, d)
	if p := (*ruleset.PartialError)(nil); err != nil && !errors.As(err, &p) {
		return err
	}
	t.moved = true
	var failed error
	for i := range d.Changes {
		if s := d.Changes[i].New; s != nil {
			failed = errors.Join(failed, clients.WriteRecent(t.a.netns, s))
		}
	}
	if failed != nil {
		t.a.options.Log.Warn(unknownClients, "error", complaint.Text(failed.Error()))
	}
	return err
}

// noticed notes that the engine has a change. The first one is that all objects are listed.
func (t *takeOver) noticed(now time.Time) {
	if t.notices.Add(1) > 1 {
		t.changed.Store(now.UnixNano())
	}
}

// waitTurn waits while a kube-proxy runs whose objects have the same names as those of the
// agent's mode: each would remove what the other writes. It does not wait for one that writes
// nothing: a process that answers must not keep the node without rules.
func (t *takeOver) waitTurn(ctx context.Context) error {
	if t.adopt && t.mode.Name == config.ModeNFTables {
		owned, err := t.mode.Owned(ctx, t.a.Log)
		t.fresh = err == nil && !owned
	}
	if !t.mode.TakesOver || t.a.options.Foreign {
		return nil
	}
	same := []takeover.Kind{{Owner: takeover.KubeProxy, Mode: t.mode.Name}}
	if t.mode.Name == config.ModeIPTables {
		// kube-proxy's mode ipvs has chains of mode iptables, too.
		same = append(same, takeover.Kind{Owner: takeover.KubeProxy, Mode: config.ModeIPVS})
	}
	waited := false
	for ; ; waited = true {
		err := t.look(ctx, true)
		i := slices.IndexFunc(same, func(k takeover.Kind) bool { return t.kinds[k] != nil && t.kinds[k].Answers() })
		if i < 0 {
			break
		}
		if err == nil && t.kinds[same[i]].Idle() {
			const text = "a process answers as kube-proxy, but its rules do not follow the Services: not waiting for its end any longer"
			t.a.Log.Error(text, "mode", same[i].Mode)
			t.a.nodeEvent(true, reasonIdleKubeProxy, text)
			return nil
		}
		if !waited {
			t.setState(same[i], "in-use")
			t.a.Log.Warn("kube-proxy runs and writes the same rules: waiting until it ends before rules are written", "mode", same[i].Mode)
		}
		if err := sleep(ctx, lookInterval); err != nil {
			return err
		}
	}
	if waited {
		t.a.Log.Info("kube-proxy has ended")
	}
	return nil
}

func (t *takeOver) setState(k takeover.Kind, state string) {
	t.kinds[k].state = state
	t.a.metrics.OtherRules(string(k.Owner), k.Mode, state)
}

// look looks for proxies and their rules. While the agent waits, rules do not matter unless a proxy
// runs, and the device of mode ipvs is not the agent's.
func (t *takeOver) look(ctx context.Context, waits bool) (err error) {
	now, answers := time.Now(), t.prober.Look(ctx)
	if runs := len(answers) != 0; runs && now.Sub(t.readAt) >= rulesInterval || !runs && !waits {
		if t.rules, err = modes.OtherRules(ctx, t.mode.Name == config.ModeIPVS && !waits, t.a.Log); err == nil {
			t.readAt = now
		}
	}
	var objects time.Time
	if n := t.changed.Load(); n != 0 {
		objects = time.Unix(0, n)
	}
	for k, o := range t.kinds {
		o.Look(now, t.rules[k], slices.ContainsFunc(answers, func(p takeover.Kind) bool { return t.writes(p, k) }), objects)
	}
	return err
}

// writes reports whether a proxy that runs owns rules of a kind. One that does not report its mode owns
// those that exist, or may be about to write any.
func (t *takeOver) writes(p, k takeover.Kind) bool {
	if p.Owner != k.Owner || p.Mode != "" {
		return p == k
	}
	for other := range t.rules {
		if other.Owner == k.Owner && t.rules[k] == 0 {
			return false
		}
	}
	return true
}

// run removes the rules of other proxies, and ends when there are none.
func (t *takeOver) run(ctx context.Context) error {
	if t.a.plane.Powerless || t.a.options.Foreign {
		return nil
	}
	own := takeover.Kind{Owner: takeover.KubeProxy, Mode: t.mode.Name}
	if t.mode.TakesOver && t.mode.Name != config.ModeIPVS { // in mode ipvs, chains of kube-proxy's mode ipvs are left
		t.setState(own, "")
		delete(t.kinds, own)
	}
	// Mode ipvs is the last, because its removal takes until its connections have ended.
	order := slices.SortedFunc(maps.Keys(t.kinds), func(a, b takeover.Kind) int {
		return cmp.Or(cmp.Compare(len(b.Mode), len(a.Mode)), cmp.Compare(a.String(), b.String()))
	})
	for _, o := range t.kinds {
		o.Watch = takeover.Watch{} // waitTurn may not have read the rules
	}
	t.readAt = time.Time{}
	first, otherFlavor := true, t.mode.CleanupFlavor
	for {
		err := t.look(ctx, false)
		if first && err == nil {
			err = t.markFirst(ctx)
		}
		if err != nil {
			if ctx.Err() == nil {
				t.a.Log.Warn("cannot look for rules of other proxies", "error", err)
			}
			if err := sleep(ctx, t.a.Config.SyncPeriod); err != nil {
				return err
			}
			continue
		}
		wait := time.Duration(0)
		if otherFlavor != nil {
			s := modes.Settings{Config: t.a.Config, Families: t.a.families, NetNS: t.a.netns, Log: t.a.Log}
			if t.succeeded(ctx, otherFlavor(ctx, s), "cannot remove the rules in the other flavor of iptables yet") {
				otherFlavor = nil
			} else {
				wait = rulesInterval
			}
		}
		for _, k := range order {
			o := t.kinds[k]
			t.note(k, o)
			// Not everything that nodeproxy leaves is found. So all of it is removed once.
			left := o.state == "left" || first && k.Owner == takeover.Nodeproxy && !o.Runs()
			if left && t.removes(k) && time.Now().After(o.next) {
				o.next = time.Now().Add(t.a.Config.SyncPeriod)
				if t.succeeded(ctx, t.remove(ctx, k), "cannot remove the rules of another proxy yet", "proxy", k.Owner, "mode", k.Mode) {
					t.readAt, wait = time.Time{}, lookInterval
				}
			}
			switch {
			case o.Answers():
				wait = lookInterval
			case o.state != "":
				wait = cmp.Or(wait, rulesInterval)
			}
		}
		first = false
		if wait == 0 {
			return nil
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// removes reports whether rules of this kind are removed when their owner has ended.
func (t *takeOver) removes(k takeover.Kind) bool { return t.adopt || k.Owner == takeover.Nodeproxy }

// succeeded reports whether a removal has no error. It logs and counts a failure. A later look tries again.
func (t *takeOver) succeeded(ctx context.Context, err error, failed string, args ...any) bool {
	if err != nil && ctx.Err() == nil {
		t.a.Log.Warn(failed, append(args, "error", err)...)
		t.a.metrics.CleanupFailed()
	}
	return err == nil
}

// note logs and reports a state that differs from the last one.
func (t *takeOver) note(k takeover.Kind, o *otherRules) {
	now := o.State()
	if now == o.state {
		return
	}
	t.setState(k, now)
	log := t.a.Log.With("proxy", k.Owner, "mode", k.Mode)
	switch {
	case now == "":
		log.Info("the rules of another proxy are gone")
	case now == "in-use" && t.removes(k):
		log.Warn("another proxy runs: its rules are removed when it has ended")
	case now == "in-use":
		log.Warn("another proxy runs, and its rules may come first: they stay without --adopt-from-kube-proxy")
	case t.removes(k):
		log.Info("removing the rules of a proxy that has ended")
		if k.Mode == config.ModeIPTables && t.mode.Name == config.ModeNFTables {
			checkLiberal(t.a.Log)
		}
	default:
		log.Warn("a proxy has ended and left its rules, which may come first and send connections to endpoints that are gone: --adopt-from-kube-proxy removes them")
	}
}

func (t *takeOver) remove(ctx context.Context, k takeover.Kind) error {
	m, err := modes.Find(t.a.options.Modes, k.Mode)
	switch kubeProxy := k.Owner == takeover.KubeProxy; {
	case err != nil:
		return err
	case m.Retire != nil && k.Mode == t.mode.Name: // everything but the chains is the agent's
		return t.removeShared(ctx)
	case m.Retire != nil && kubeProxy:
		// kube-proxy's mode ipvs shares chains with its mode iptables: they lead to chains, and use sets,
		// of mode ipvs only. So they are removed first, and again when the mode is gone, since some were
		// in use.
		if err := t.removeShared(ctx); err != nil {
			return err
		}
		if err := m.Retire(ctx, m, true, t.a.Config.DrainLimit, t.a.Log); err != nil {
			return err
		}
		return errors.Join(t.removeShared(ctx), m.CleanupKubeProxy(ctx, t.a.Log))
	case m.Retire != nil:
		return m.Retire(ctx, m, false, t.a.Config.DrainLimit, t.a.Log)
	case !kubeProxy:
		return m.Cleanup(ctx, t.a.Log)
	case k.Mode == config.ModeNFTables && t.mode.Name == k.Mode && t.a.Config.KubeProxyTable != config.TableNever:
		t.marking.Store(true)
		return takeover.Mark(t.a.families, true)
	}
	return m.CleanupKubeProxy(ctx, t.a.Log)
}

// removeShared removes the chains of kube-proxy's mode iptables, unless that mode runs or is the
// agent's own.
func (t *takeOver) removeShared(ctx context.Context) error {
	o := t.kinds[takeover.Kind{Owner: takeover.KubeProxy, Mode: config.ModeIPTables}]
	if o == nil || o.Runs() {
		return nil
	}
	m, err := modes.Find(t.a.options.Modes, config.ModeIPTables)
	if err != nil {
		return err
	}
	return m.CleanupKubeProxy(ctx, t.a.Log)
}

// markFirst makes the markers that are wanted, or removes those that are not. In modes other than nftables
// the removal of that mode removes them. Whether a node that was booted had a marker is not known. It
// gets one, unless rules of kube-proxy show that its Services were not in nftables.
func (t *takeOver) markFirst(ctx context.Context) error {
	if t.mode.Name != config.ModeNFTables {
		return nil
	}
	if t.a.Config.KubeProxyTable == config.TableNever {
		return takeover.Unmark(ctx)
	}
	marked, err := takeover.Marked(ctx)
	kubeProxy := slices.ContainsFunc(slices.Collect(maps.Keys(t.rules)), func(k takeover.Kind) bool { return k.Owner == takeover.KubeProxy })
	if len(marked) != 0 || t.fresh && !kubeProxy || t.a.Config.KubeProxyTable == config.TableAlways {
		t.marking.Store(true)
	}
	return errors.Join(err, t.mark())
}

// mark makes the markers that are kept. It is called after a repair of the rules: what deleted them may
// have deleted all tables.
func (t *takeOver) mark() error {
	if !t.marking.Load() {
		return nil
	}
	return takeover.Mark(t.a.families, false)
}

// sleep waits for a time, or returns the error of ctx when it is done.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
