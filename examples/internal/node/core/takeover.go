package core

import (
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

// The intervals of looks for the rules of other proxies: while there are none, while there are
// some, and while the agent is going to remove them.
const (
	lookInterval    = 30 * time.Second
	presentInterval = 15 * time.Second
	waitInterval    = time.Second
)

// takeOver finds the rules of other proxies: of kube-proxy, and of nodeproxy's other modes. It
// removes them when their owner has ended and the rules of the agent's mode are in effect. It
// removes kube-proxy's only if adopt is set. It looks for as long as the agent runs, because a
// proxy that still runs, or is started, writes its rules again.
type takeOver struct {
	modes []modes.Mode
	inUse string // the agent's mode
	adopt bool
	// marks is when markers are made, and marking reports that they are kept. families are
	// those of the markers.
	marks    config.KubeProxyTable
	marking  bool
	families []tracker.Family
	// fresh reports that the agent is to take over from kube-proxy but had no rules when it
	// started: the node is new, or was booted.
	fresh bool
	// powerless reports that the process cannot read or remove rules.
	powerless bool
	// retry is how long to wait after a failure.
	retry time.Duration
	// drainLimit is [config.Config].DrainLimit.
	drainLimit time.Duration
	// failed is called for each failure, and report with each new state of a kind.
	failed func()
	// panicked ends the agent.
	panicked func(error)
	report   func(takeover.Kind, takeover.State)
	event    func(warning bool, reason, message string)
	log      *slog.Logger

	netns *os.File
	// within calls a function in the agent's network namespace.
	within func(func() error) error
	kernel *takeover.Kernel
	prober *takeover.Prober
	// cleanupFlavor removes the rules of the agent's mode in the other flavor of iptables. It is nil
	// when they are removed, and if there is no other flavor.
	cleanupFlavor func(context.Context) error
	// moved reports that mode iptables has the clients of kube-proxy's nftables mode.
	moved bool

	// inEffect is closed when the rules of the agent's mode are in effect. done is the
	// function that closes it.
	inEffect chan struct{}
	done     func()
	// ownChange is when objects last changed the agent's rules, and objectChange when they last
	// changed after the first lists, in Unix nanoseconds. notices counts these changes and the lists.
	ownChange, objectChange, notices atomic.Int64

	kinds   map[takeover.Kind]*otherRules
	looked  bool
	retired sync.WaitGroup
	// retiring reports that rules of mode ipvs are being removed in the background.
	retiring atomic.Bool
}

// otherRules is what takeOver knows of the rules of one kind.
type otherRules struct {
	takeover.Watch
	state takeover.State
	// next is the earliest time of the next attempt at a removal.
	next time.Time
	// inUse reports that the state is InUse.
	inUse atomic.Bool
}

// newTakeOver returns the takeOver of an agent. bound reports whether one of the agent's own
// servers listens at an address.
func newTakeOver(o *Options, families []tracker.Family, netns *os.File, instance string, bound func(addr string) bool) *takeOver {
	cfg, all, log := o.Config, o.Modes, o.Log
	t := &takeOver{
		modes: all, inUse: cfg.Mode, adopt: cfg.Adopt && !o.Foreign, within: o.Within, marks: cfg.KubeProxyTable, families: families, retry: cfg.SyncPeriod, drainLimit: cfg.DrainLimit, log: log, netns: netns,
		kernel:   &takeover.Kernel{NetNS: netns, Legacy: func(ctx context.Context) (map[takeover.Kind]bool, error) { return modes.LegacyKinds(ctx, log) }},
		prober:   &takeover.Prober{Own: instance, Dial: o.Dial, Skip: bound, Runs: takeover.KubeProxyRuns, Trusted: takeover.ListenerIsRoots},
		inEffect: make(chan struct{}), kinds: map[takeover.Kind]*otherRules{},
	}
	t.done = sync.OnceFunc(func() { close(t.inEffect) })
	t.prober.Metrics, t.prober.Healthz = takeover.Addresses(cfg.Effective.MetricsBindAddress, cfg.Effective.HealthzBindAddress)
	for _, m := range all {
		if m.Name == t.inUse && m.CleanupFlavor != nil {
			s := modes.Settings{Config: cfg, Families: families, NetNS: netns, Log: log}
			t.cleanupFlavor = func(ctx context.Context) error { return m.CleanupFlavor(ctx, s) }
		}
		if m.Name != t.inUse {
			t.kinds[takeover.Kind{Owner: takeover.Nodeproxy, Mode: m.Name}] = &otherRules{}
		}
		// In mode ipvs, chains of kube-proxy's mode ipvs are left.
		if m.Name != t.inUse || !m.TakesOver || m.Name == config.ModeIPVS {
			t.kinds[takeover.Kind{Owner: takeover.KubeProxy, Mode: m.Name}] = &otherRules{}
		}
	}
	return t
}

const unknownClients = "cannot keep the endpoints of clients of kube-proxy: some may get others"

// rememberedClients returns a function that returns the clients that kube-proxy remembers for an
// endpoint. It reads them once, at its first call. The agent's own memory, if there is any, is in
// the table that the agent keeps.
func rememberedClients(netns *os.File, log *slog.Logger) func(tracker.Key, netip.AddrPort) map[netip.Addr]time.Duration {
	read := sync.OnceValue(func() *takeover.Clients {
		c, err := takeover.ReadClients(context.Background(), netns)
		if err != nil {
			log.Warn(unknownClients, "error", err)
		}
		return c
	})
	return func(k tracker.Key, endpoint netip.AddrPort) map[netip.Addr]time.Duration {
		return read().Of(k, endpoint)
	}
}

// applyWithClients applies a delta. In mode iptables it gives the endpoints the clients that they
// have in kube-proxy's nftables mode, with the first full delta. The kernel has a list of clients
// only while a rule refers to it, so the clients are written when the rules are in effect.
func (t *takeOver) applyWithClients(ctx context.Context, d *ruleset.Delta, apply func(context.Context, *ruleset.Delta) error) error {
	if !d.Full || t.moved || !t.adopt || t.inUse != config.ModeIPTables {
		return apply(ctx, d)
	}
	clients, err := takeover.ReadClients(ctx, t.netns)
	if err != nil {
		t.log.Warn(unknownClients, "error", err)
	}
	err = apply(ctx, d)
	if p := (*ruleset.PartialError)(nil); err != nil && !errors.As(err, &p) {
		return err
	}
	t.moved = true
	var errs []error
	for i := range d.Changes {
		if s := d.Changes[i].New; s != nil {
			errs = append(errs, clients.WriteRecent(t.netns, s))
		}
	}
	if err := errors.Join(errs...); err != nil {
		t.log.Warn(unknownClients, "error", complaint.Text(err.Error()))
	}
	return err
}

// waitTurn waits while a kube-proxy runs whose objects have the same names as those of the
// agent's mode: each would remove what the other writes. It does not wait for one whose rules do not
// follow the objects: see [takeover.Wait].
func (t *takeOver) waitTurn(ctx context.Context) error {
	m, err := modes.Find(t.modes, t.inUse)
	if err != nil {
		return err
	}
	if t.adopt {
		owned, err := m.Owned(ctx, t.log)
		t.fresh = err == nil && !owned
	}
	if !m.TakesOver {
		return nil
	}
	same := []takeover.Kind{{Owner: takeover.KubeProxy, Mode: t.inUse}}
	if t.inUse == config.ModeIPTables {
		// kube-proxy's mode ipvs has chains of mode iptables, too.
		same = append(same, takeover.Kind{Owner: takeover.KubeProxy, Mode: config.ModeIPVS})
	}
	var waits takeover.Kind
	var wait takeover.Wait
	for misses, looks := 0, 0; misses < 2; looks++ {
		answers := t.prober.Look(ctx)
		i := slices.IndexFunc(same, func(k takeover.Kind) bool { return slices.Contains(answers, k) })
		switch {
		case i < 0 && waits.Mode == "":
			return nil
		case i < 0:
			misses++
		case waits.Mode == "":
			waits = same[i]
			t.report(waits, takeover.InUse)
			t.log.Warn("kube-proxy runs and writes the same rules: waiting until it ends before rules are written", "mode", waits.Mode)
			fallthrough
		default:
			misses = 0
			if looks%int(presentInterval/waitInterval) == 0 && t.waitIsOver(ctx, &wait, same) {
				t.log.Error(idleKubeProxy, "mode", waits.Mode)
				t.event(true, reasonIdleKubeProxy, idleKubeProxy)
				return nil
			}
		}
		if err := sleep(ctx, waitInterval); err != nil {
			return err
		}
	}
	t.report(waits, takeover.Absent)
	t.log.Info("kube-proxy has ended", "mode", waits.Mode)
	return nil
}

const idleKubeProxy = "a process answers as kube-proxy, but its rules do not follow the Services: not waiting for its end any longer"

// waitIsOver looks at the rules of some kinds and reports whether their owner does not write them.
func (t *takeOver) waitIsOver(ctx context.Context, w *takeover.Wait, kinds []takeover.Kind) bool {
	all, err := t.kernel.Look(ctx)
	if err != nil {
		return false // unknown
	}
	var rules takeover.Rules
	for _, k := range kinds {
		if all[k].Present {
			rules = all[k]
		}
	}
	var objects time.Time
	if n := t.objectChange.Load(); n != 0 {
		objects = time.Unix(0, n)
	}
	return w.Over(time.Now(), rules, objects)
}

// noticed notes that the engine has a change. The first one is that all objects are listed.
func (t *takeOver) noticed(now time.Time) {
	if t.notices.Add(1) > 1 {
		t.objectChange.Store(now.UnixNano())
	}
}

// changed notes that objects changed the agent's rules.
func (t *takeOver) changed() { t.ownChange.Store(time.Now().UnixNano()) }

// run looks for rules of other proxies from when the agent's own are in effect until ctx is
// done. It leaves rules that it was removing.
func (t *takeOver) run(ctx context.Context) error {
	defer t.retired.Wait()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.inEffect:
	}
	if t.powerless {
		<-ctx.Done()
		return ctx.Err()
	}
	t.kernel.OwnDevice = t.inUse == config.ModeIPVS
	for {
		interval, err := t.look(ctx)
		if err != nil && ctx.Err() == nil {
			t.log.Warn("cannot look for rules of other proxies", "error", err)
			interval = t.retry
		}
		if t.cleanupFlavor != nil {
			if err := t.cleanupFlavor(ctx); err == nil {
				t.cleanupFlavor = nil
			} else if ctx.Err() == nil {
				t.log.Warn("cannot remove the rules in the other flavor of iptables yet", "error", err)
				t.failed()
			}
		}
		if err := sleep(ctx, interval); err != nil {
			return err
		}
	}
}

// look makes one look, and returns the time until the next one.
func (t *takeOver) look(ctx context.Context) (time.Duration, error) {
	rules, err := t.kernel.Look(ctx)
	if err != nil {
		return 0, err
	}
	first := !t.looked
	var answers []takeover.Kind
	if present := func(k takeover.Kind) bool { return rules[k].Present }; first || slices.ContainsFunc(slices.Collect(maps.Keys(t.kinds)), present) {
		answers = t.prober.Look(ctx)
	}
	t.looked = true
	var own time.Time
	if n := t.ownChange.Load(); n != 0 {
		own = time.Unix(0, n)
	}
	interval := lookInterval
	for k, o := range t.kinds {
		if k.Mode == config.ModeIPVS && t.retiring.Load() {
			interval = waitInterval
			continue
		}
		s := takeover.Sighting{Present: rules[k].Present, Stamp: rules[k].Stamp, Answers: slices.Contains(answers, k), OwnChange: own}
		state := o.Look(time.Now(), s)
		t.note(k, o, state)
		// Not everything that nodeproxy leaves is found. So all of it is removed once.
		unknown := first && k.Owner == takeover.Nodeproxy && !s.Answers
		o.inUse.Store(state == takeover.InUse)
		if state == takeover.Left || unknown {
			t.remove(ctx, k, o)
		}
		switch {
		case o.state == takeover.Absent:
		case t.removes(k):
			interval = min(interval, waitInterval)
		default:
			interval = min(interval, presentInterval)
		}
	}
	return interval, t.mark(ctx, rules)
}

// mark makes the markers that are wanted and missing, or removes those that are not wanted. In
// modes other than nftables the removal of that mode removes them.
func (t *takeOver) mark(ctx context.Context, rules map[takeover.Kind]takeover.Rules) error {
	if t.inUse != config.ModeNFTables {
		return nil
	}
	marked := t.kernel.Marked()
	switch t.marks {
	case config.TableNever:
		if len(marked) != 0 {
			return takeover.Unmark(ctx)
		}
		return nil
	case config.TableAlways:
		t.marking = true
	case config.TableAdopted:
		// Whether a node that was booted had a marker is not known. It gets one, unless rules of
		// kube-proxy show that its Services were not in nftables.
		t.fresh = t.fresh && !slices.ContainsFunc(slices.Collect(maps.Keys(rules)), func(k takeover.Kind) bool {
			return k.Owner == takeover.KubeProxy && rules[k].Present
		})
		t.marking = t.marking || len(marked) != 0 || t.fresh
	}
	if !t.marking || rules[takeover.Kind{Owner: takeover.KubeProxy, Mode: config.ModeNFTables}].Present || !slices.ContainsFunc(t.families, func(f tracker.Family) bool { return !slices.Contains(marked, f) }) {
		return nil
	}
	return takeover.Mark(t.families)
}

// replaceByMarker removes the rules of kube-proxy's nftables mode, and makes markers in the same
// transaction.
func (t *takeOver) replaceByMarker(ctx context.Context, _ *slog.Logger) error {
	if err := takeover.Replace(ctx, t.families); err != nil {
		return err
	}
	t.marking = true
	return nil
}

// removes reports whether rules of this kind are removed when their owner has ended.
func (t *takeOver) removes(k takeover.Kind) bool { return t.adopt || k.Owner == takeover.Nodeproxy }

// note logs and reports a state that differs from the last one.
func (t *takeOver) note(k takeover.Kind, o *otherRules, now takeover.State) {
	if o.state == now || o.state == "" && now == takeover.Absent {
		o.state = now
		return
	}
	o.state = now
	t.report(k, now)
	switch {
	case now == takeover.Absent:
		t.log.Info("the rules of another proxy are gone", "proxy", k.Owner, "mode", k.Mode)
	case now == takeover.InUse && t.removes(k):
		t.log.Warn("another proxy runs: its rules are removed when it has ended", "proxy", k.Owner, "mode", k.Mode)
	case now == takeover.InUse:
		t.log.Warn("another proxy runs, and its rules may come first: they stay without --adopt-from-kube-proxy", "proxy", k.Owner, "mode", k.Mode)
	case t.removes(k):
		t.log.Info("removing the rules of a proxy that has ended", "proxy", k.Owner, "mode", k.Mode)
		if k.Mode == config.ModeIPTables && t.inUse == config.ModeNFTables {
			checkLiberal(t.log)
		}
	default:
		t.log.Warn("a proxy has ended and left its rules, which may come first and send connections to endpoints that are gone: --adopt-from-kube-proxy removes them", "proxy", k.Owner, "mode", k.Mode)
	}
}

// remove removes the rules of a kind. Removing mode ipvs takes until its connections have ended,
// and runs in the background.
func (t *takeOver) remove(ctx context.Context, k takeover.Kind, o *otherRules) {
	m, err := modes.Find(t.modes, k.Mode)
	if err != nil || !t.removes(k) || time.Now().Before(o.next) {
		return
	}
	o.next = time.Now().Add(t.retry)
	if k.Mode == t.inUse && m.Retire != nil { // everything but the chains is the agent's
		t.result(ctx, k, t.removeShared(ctx))
		return
	}
	if m.Retire != nil {
		// Meanwhile the mode's rules are the agent's own.
		t.retiring.Store(true)
		t.retired.Go(func() {
			defer t.retiring.Store(false)
			defer recovered(func(err error) { t.panicked(err) })
			for {
				err := t.within(func() error { return t.retire(ctx, m, k.Owner == takeover.KubeProxy) })
				t.result(ctx, k, err)
				if err == nil || sleep(ctx, t.retry) != nil {
					return
				}
			}
		})
		return
	}
	cleanup := m.Cleanup
	if k.Owner == takeover.KubeProxy {
		cleanup = m.CleanupKubeProxy
		if k.Mode == config.ModeNFTables && t.inUse == k.Mode && t.marks != config.TableNever {
			cleanup = t.replaceByMarker
		}
	}
	t.result(ctx, k, cleanup(ctx, t.log))
}

// result logs and counts the failure of a removal. The next look tries again.
func (t *takeOver) result(ctx context.Context, k takeover.Kind, err error) {
	if err != nil && ctx.Err() == nil {
		t.log.Warn("cannot remove the rules of another proxy yet", "proxy", k.Owner, "mode", k.Mode, "error", err)
		t.failed()
	}
}

// retire removes a mode that has a retire function. kube-proxy's mode ipvs shares chains with its
// mode iptables: they lead to chains, and use sets, of mode ipvs only. So they are removed first,
// and again when the mode is gone, since some were in use.
func (t *takeOver) retire(ctx context.Context, m modes.Mode, kubeProxy bool) error {
	if !kubeProxy {
		return m.Retire(ctx, m, false, t.drainLimit, t.log)
	}
	if err := t.removeShared(ctx); err != nil {
		return err
	}
	if err := m.Retire(ctx, m, true, t.drainLimit, t.log); err != nil {
		return err
	}
	return errors.Join(t.removeShared(ctx), m.CleanupKubeProxy(ctx, t.log))
}

// removeShared removes the chains of kube-proxy's mode iptables, unless that mode runs or is the
// agent's own.
func (t *takeOver) removeShared(ctx context.Context) error {
	o := t.kinds[takeover.Kind{Owner: takeover.KubeProxy, Mode: config.ModeIPTables}]
	if o == nil || o.inUse.Load() {
		return nil
	}
	m, err := modes.Find(t.modes, config.ModeIPTables)
	if err != nil {
		return err
	}
	return m.CleanupKubeProxy(ctx, t.log)
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
