package core

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
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
	adopt bool
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
	mode modes.Mode
	// removed reports that they were removed at least once.
	removed bool
	// state is the one that was reported last.
	state string
	// next is the earliest time of the next attempt at a removal.
	next time.Time
}

func newTakeOver(a *Agent) *takeOver {
	o, e := &a.options, a.options.Config.Effective
	t := &takeOver{
		a: a, adopt: o.Config.Adopt && !o.Foreign, kinds: map[takeover.Kind]*otherRules{},
		prober: &takeover.Prober{
			Own: a.instance, Pages: takeover.Pages(e.MetricsBindAddress, e.HealthzBindAddress),
			Dial: o.Dial, Runs: takeover.KubeProxyRuns, Trusted: takeover.ListenerIsRoots,
		},
	}
	for _, m := range o.Modes {
		t.kinds[takeover.Kind{Owner: takeover.KubeProxy, Mode: m.Name}] = &otherRules{mode: m}
		if m.Name == a.mode.Name {
			if m.CleanupFlavor == nil {
				continue
			}
			m.Cleanup = func(ctx context.Context, log *slog.Logger) error {
				return m.CleanupFlavor(ctx, modes.Settings{Config: a.Config, Families: a.families, NetNS: a.netns, Log: log})
			}
			m.Retire = nil
		}
		t.kinds[takeover.Kind{Owner: takeover.Nodeproxy, Mode: m.Name}] = &otherRules{mode: m}
	}
	return t
}

const unknownClients = "cannot keep the endpoints of clients of kube-proxy: some may get others"

// applied gives the endpoints in mode iptables the clients that they have in kube-proxy's nftables mode, when the
// first full delta is in effect. That mode's rules are there until run removes them.
func (t *takeOver) applied(d *ruleset.Delta, err error) {
	if !d.Full || t.moved || !t.adopt || t.a.mode.Name != config.ModeIPTables || !ruleset.InEffect(err) {
		return
	}
	t.moved = true
	if err := t.a.clients().WriteRecent(t.a.netns, d); err != nil {
		t.a.Log.Warn(unknownClients, "error", complaint.Text(err.Error()))
	}
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
	mode := t.a.mode
	t.marking.Store(t.wantsMarker(ctx))
	if !mode.TakesOver || t.a.options.Foreign {
		return nil
	}
	for waited := false; ; waited = true {
		err := t.look(ctx, true)
		same := takeover.Kind{Owner: takeover.KubeProxy, Mode: mode.Name}
		if mode.Name == config.ModeIPTables && !t.kinds[same].Answers() {
			same.Mode = config.ModeIPVS // has chains of mode iptables, too
		}
		o := t.kinds[same]
		switch {
		case o == nil || !o.Answers():
			if waited {
				t.a.Log.Info("kube-proxy has ended")
			}
			return nil
		case err == nil && o.Idle():
			const text = "a process answers as kube-proxy, but its rules do not follow the Services: not waiting for its end any longer"
			t.a.Log.Error(text, "mode", same.Mode)
			t.a.nodeEvent(true, reasonIdleKubeProxy, text)
			return nil
		case !waited:
			t.setState(same, "in-use")
			t.a.Log.Warn("kube-proxy runs and writes the same rules: waiting until it ends before rules are written", "mode", same.Mode)
		}
		if err := sleep(ctx, lookInterval); err != nil {
			return err
		}
	}
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
		if t.rules, err = modes.OtherRules(ctx, t.a.mode.Name == config.ModeIPVS && !waits, t.a.Log); err == nil {
			t.readAt = now
		}
	}
	var objects time.Time
	if n := t.changed.Load(); n != 0 {
		objects = time.Unix(0, n)
	}
	for k, o := range t.kinds {
		if k == (takeover.Kind{Owner: takeover.Nodeproxy, Mode: t.a.mode.Name}) {
			continue // the agent's own
		}
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
	own := takeover.Kind{Owner: takeover.KubeProxy, Mode: t.a.mode.Name}
	if t.a.mode.TakesOver && own.Mode != config.ModeIPVS { // in mode ipvs, chains of kube-proxy's mode ipvs are left
		t.setState(own, "")
		delete(t.kinds, own)
	}
	for _, o := range t.kinds {
		o.Watch = takeover.Watch{} // waitTurn may not have read the rules
	}
	t.readAt = time.Time{}
	for {
		wait, err := t.pass(ctx)
		if err != nil && ctx.Err() == nil {
			t.a.Log.Warn("cannot look for rules of other proxies", "error", err)
		}
		if wait == 0 {
			return nil
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// pass looks once, and removes what has been left. It returns the time until the next look, or 0 at the end.
func (t *takeOver) pass(ctx context.Context) (wait time.Duration, err error) {
	if err := t.look(ctx, false); err != nil {
		return t.a.Config.SyncPeriod, err
	}
	// Mode ipvs is the last, because its removal takes until its connections have ended.
	order := slices.SortedFunc(maps.Keys(t.kinds), func(a, b takeover.Kind) int {
		return cmp.Or(cmp.Compare(len(b.Mode), len(a.Mode)), cmp.Compare(a.String(), b.String()))
	})
	for _, k := range order {
		o := t.kinds[k]
		t.note(k, o)
		// Not everything that nodeproxy leaves is found. So all of it is removed once.
		unseen := k.Owner == takeover.Nodeproxy && !o.removed && !o.Runs()
		if (o.state == "left" || unseen) && t.removes(k) && time.Now().After(o.next) {
			o.next = time.Now().Add(t.a.Config.SyncPeriod)
			if err := t.remove(ctx, k, o.mode); err == nil {
				o.removed, unseen = true, false
				t.readAt, wait = time.Time{}, lookInterval
			} else if ctx.Err() == nil {
				t.a.Log.Warn("cannot remove the rules of another proxy yet", "proxy", k.Owner, "mode", k.Mode, "error", err)
				t.a.metrics.CleanupFailed()
			}
		}
		switch {
		case o.Answers():
			wait = lookInterval
		case o.state != "" || unseen:
			wait = cmp.Or(wait, rulesInterval)
		}
	}
	return wait, nil
}

// removes reports whether rules of this kind are removed when their owner has ended.
func (t *takeOver) removes(k takeover.Kind) bool { return t.adopt || k.Owner == takeover.Nodeproxy }

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
		if k.Mode == config.ModeIPTables && t.a.mode.Name == config.ModeNFTables {
			checkLiberal(t.a.Log)
		}
	default:
		log.Warn("a proxy has ended and left its rules, which may come first and send connections to endpoints that are gone: --adopt-from-kube-proxy removes them")
	}
}

func (t *takeOver) remove(ctx context.Context, k takeover.Kind, m modes.Mode) error {
	drain := func() error { return m.Retire(ctx, m, k.Owner == takeover.KubeProxy, t.a.Config.DrainLimit, t.a.Log) }
	switch kubeProxy := k.Owner == takeover.KubeProxy; {
	case m.Retire == nil && !kubeProxy:
		return m.Cleanup(ctx, t.a.Log)
	case k.Mode == config.ModeNFTables && t.a.mode.Name == k.Mode && t.a.Config.KubeProxyTable != config.TableNever:
		t.marking.Store(true)
		return takeover.Mark(t.a.families, true)
	case m.Retire == nil:
		return m.CleanupKubeProxy(ctx, t.a.Log)
	case !kubeProxy:
		return drain()
	case k.Mode == t.a.mode.Name: // everything but the chains is the agent's
		return t.removeShared(ctx)
	}
	// kube-proxy's mode ipvs shares chains with its mode iptables: they lead to chains, and use sets,
	// of mode ipvs only. So they are removed first, and again when the mode is gone, since some were
	// in use.
	err := t.removeShared(ctx)
	if err == nil {
		err = drain()
	}
	if err != nil {
		return err
	}
	return errors.Join(t.removeShared(ctx), m.CleanupKubeProxy(ctx, t.a.Log))
}

// removeShared removes the chains of kube-proxy's mode iptables, unless that mode runs or is the
// agent's own.
func (t *takeOver) removeShared(ctx context.Context) error {
	o := t.kinds[takeover.Kind{Owner: takeover.KubeProxy, Mode: config.ModeIPTables}]
	if o == nil || o.Runs() {
		return nil
	}
	return o.mode.CleanupKubeProxy(ctx, t.a.Log)
}

// wantsMarker reports whether the agent keeps markers from its start. A node that has no rules at all, to which
// the agent is to bring those of kube-proxy, is new or was booted. It may have had a marker, and gets one.
func (t *takeOver) wantsMarker(ctx context.Context) bool {
	if t.a.mode.Name != config.ModeNFTables || t.a.options.Foreign || t.a.Config.KubeProxyTable == config.TableNever {
		return false
	}
	marked, err := takeover.Marked()
	if err == nil && len(marked) == 0 && t.adopt {
		var rules map[takeover.Kind]uint64
		if rules, err = modes.OtherRules(ctx, false, t.a.Log); err == nil && len(rules) == 0 {
			return true
		}
	}
	if err != nil && ctx.Err() == nil {
		t.a.Log.Warn("cannot look for the tables of kube-proxy: none is kept for programs that look for them", "error", err)
	}
	return len(marked) != 0 || t.a.Config.KubeProxyTable == config.TableAlways
}

// mark makes the markers that are kept, or removes those that are not wanted. In modes other than nftables
// the removal of that mode removes them. It is called when the rules are in effect for the first time, and after a
// repair: what deleted them may have deleted all tables.
func (t *takeOver) mark() error {
	switch {
	case t.marking.Load():
		return takeover.Mark(t.a.families, false)
	case t.a.mode.Name == config.ModeNFTables && !t.a.options.Foreign && t.a.Config.KubeProxyTable == config.TableNever:
		return takeover.Unmark()
	}
	return nil
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
