package core

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/internal/node/tuning"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// TestDriftThatIsFoundDuringASyncIsRepaired finds rules that another process altered while a
// sync runs that has already applied its changes.
func TestDriftThatIsFoundDuringASyncIsRepaired(t *testing.T) {
	for name, succeeds := range map[string]bool{"the sync succeeds": true, "the sync fails": false} {
		t.Run(name, func(t *testing.T) {
			tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node"}}))(t)
			tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
			engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr}))(t)
			var full bool
			cursor := engine.Attach("rules", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
				full = d.Full
				return nil
			}))
			must.Do(t, cursor.Sync(t.Context()))
			triggered := make(chan struct{}, 10)
			r := must.Get(runner.New(runner.Config{Hooks: &runner.Hooks{Queued: func(time.Time) { triggered <- struct{}{} }}}, func(context.Context) error { return nil }))(t)
			healthy := must.Get(health.NewProxy(health.ProxyConfig{Timeout: time.Hour}))(t)
			healthy.Done(true)
			a := &Agent{World: &objects.World{Config: &config.Config{SyncPeriod: time.Hour}}, observers: &observers{Proxy: healthy}, runner: r}
			a.Log = slog.New(slog.DiscardHandler)
			a.retry = time.AfterFunc(time.Hour, r.Trigger)
			a.retry.Stop()

			a.mu.Lock() // a sync begins
			handled := make(chan struct{})
			go func() {
				defer close(handled)
				a.drifted("rules", cursor)(&dataplane.DriftError{Backend: "test", Family: tracker.IPv6, What: "a rule is missing"})
			}()
			select {
			case <-handled:
			case <-time.After(100 * time.Millisecond): // drifted waits
			}
			a.upToDate = succeeds
			if !succeeds {
				a.failures, a.failedAt = 1, time.Now()
			}
			a.mu.Unlock() // the sync ends
			<-handled
			if got := len(triggered) != 0; got != succeeds || healthy.Healthy() != succeeds {
				t.Errorf("another sync was requested: %t, healthy: %t", got, healthy.Healthy())
			}
			if !succeeds {
				<-triggered // a second later
			}
			full = false
			must.Do(t, cursor.Sync(t.Context()))
			if !full {
				t.Error("the next sync does not compare everything")
			}
		})
	}
}

func TestListenersAreBounded(t *testing.T) {
	limits := modes.LimitsFor(0)
	limits.Sockets = 2
	listen := listenWithin(limits, new(net.ListenConfig).Listen)
	var open []net.Listener
	for range 2 {
		x := must.Get(listen(t.Context(), "tcp4", "127.0.0.1:0"))(t)
		defer x.Close()
		open = append(open, x)
	}
	if x, err := listen(t.Context(), "tcp4", "127.0.0.1:0"); err == nil {
		x.Close()
		t.Error("a third listener was opened")
	}
	// Closing a listener twice gives back one.
	open[0].Close()
	open[0].Close()
	x, err := listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("after one was closed: %v", err)
	}
	defer x.Close()
	// A failure gives back its own.
	for range 3 {
		if _, err := listen(t.Context(), "tcp4", "192.0.2.255:1"); err == nil {
			t.Fatal("a foreign address can be listened at")
		}
	}
	open[1].Close()
	if x, err := listen(t.Context(), "tcp4", "127.0.0.1:0"); err != nil {
		t.Errorf("after failures: %v", err)
	} else {
		x.Close()
	}
}

// TestEachParameterCanBeLeftAlone checks that every parameter has a flag that leaves it alone.
func TestEachParameterCanBeLeftAlone(t *testing.T) {
	args := []string{"run", "--conntrack-udp-timeout=1s", "--conntrack-udp-timeout-stream=1s", "--conntrack-tcp-be-liberal"}
	all := tuning.Settings(configtest.Parsed(t, args).Effective.Conntrack, 1)
	if len(all) != 7 {
		t.Errorf("%d parameters are set: %v", len(all), all)
	}
	for _, s := range all {
		left := tuning.Settings(configtest.Parsed(t, append(slices.Clip(args), s.Skip)).Effective.Conntrack, 1)
		if slices.ContainsFunc(left, func(o tuning.Setting) bool { return o.Path == s.Path }) || len(left) == 0 {
			t.Errorf("%s leaves %v", s.Skip, left)
		}
	}
}

// TestTemporaryErrorTurnsNoFeatureOff opens the clean-up of UDP flows without the feature, and
// without memory.
func TestTemporaryErrorTurnsNoFeatureOff(t *testing.T) {
	var log strings.Builder
	l := slog.New(slog.NewTextHandler(&log, nil))
	lacks := &dataplane.UnsupportedError{Backend: "conntrack", Feature: "netlink"}
	if err := optional("without it", lacks, l); err != nil || !strings.Contains(log.String(), "without it") {
		t.Errorf("error %v, log %q", err, &log)
	}
	if err := optional("without it", fmt.Errorf("cannot read: %w", syscall.ENOBUFS), l); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("error %v", err)
	}
}

// TestPartsStandBehindWhatTheyNeed checks the order in which an agent opens its parts.
func TestPartsStandBehindWhatTheyNeed(t *testing.T) {
	c := configtest.Parsed(t, []string{"run"})
	a := &Agent{options: Options{Config: c, Serve: true}}
	open := map[string]bool{}
	for _, p := range a.parts() {
		for _, need := range p.needs {
			if !open[need] {
				t.Errorf("%s needs %s, which is not open before", p.name, need)
			}
		}
		if open[p.name] {
			t.Errorf("two parts are named %s", p.name)
		}
		open[p.name] = true
	}
}
