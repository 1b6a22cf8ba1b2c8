package ruleset

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// checkStatus compares what the cursor knows of each Service with what p accepted in the last Sync,
// and with the part of the ruleset that p should have. later: changes may be left for another Sync.
func (p *plane) checkStatus(c *Cursor, s *Snapshot, ok, later bool) {
	p.t.Helper()
	wanted, keys := map[tracker.Key]*Port{}, map[tracker.Key]bool{}
	for _, svc := range s.Ports {
		wanted[svc.Key] = svc
		keys[svc.Key] = true
	}
	for k := range p.acked {
		keys[k] = true
	}
	for k := range keys {
		st := c.Status(k)
		differs, unsure := diff(st.Port, wanted[k]) != 0, false
		if id := c.engine.find(k); id != 0 {
			_, unsure = c.failures[id]
		}
		switch {
		case diff(st.Port, p.acked[k]) != 0 || st.Since.IsZero() != (st.Port == nil) || st.Since.After(time.Now()):
			p.t.Fatalf("%s: %s: in effect since %v is %v, want %v", p.name, k, st.Since, st.Port, p.acked[k])
		case ok && (st.Err != nil || !st.WaitingSince.IsZero()):
			p.t.Fatalf("%s: %s: waits since %v after a success: %v", p.name, k, st.WaitingSince, st.Err)
		case st.WaitingSince.IsZero() == (differs || unsure) || st.WaitingSince.After(time.Now()):
			p.t.Fatalf("%s: %s: waits since %v; it differs: %t, it failed: %t, error %v", p.name, k, st.WaitingSince, differs, unsure, st.Err)
		case (st.Err != nil) != (differs || unsure) && !later:
			p.t.Fatalf("%s: %s: error %v; it differs: %t, it failed: %t", p.name, k, st.Err, differs, unsure)
		case st.Err != nil && !errors.Is(st.Err, errInjected) && !errors.Is(st.Err, ErrNeedFull) && st.Err != errUnfinished:
			p.t.Fatalf("%s: %s: error %v", p.name, k, st.Err)
		}
		if before := p.status[k]; before.Port == st.Port && before.Since != st.Since {
			p.t.Fatalf("%s: %s: in effect since %v, was %v", p.name, k, st.Since, before.Since)
		}
		p.status[k] = st
	}
}

// TestStatusOfAService follows a Service through changes and failures.
func TestStatusOfAService(t *testing.T) { synctest.Test(t, testStatus) }

func testStatus(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	start := time.Now()
	var answers []error
	c := e.Attach("plane", BackendFunc(func(context.Context, *Delta) error {
		if len(answers) == 0 {
			return nil
		}
		err := answers[0]
		answers = answers[1:]
		return err
	}))
	a, b := key("a", tracker.IPv4), key("b", tracker.IPv4)
	seconds := func(at time.Time) string {
		if at.IsZero() {
			return "never"
		}
		return at.Sub(start).Truncate(time.Second).String() // times differ by a nanosecond at least
	}
	check := func(k tracker.Key, since, waits string, err error) {
		t.Helper()
		st := c.Status(k)
		if seconds(st.Since) != since || seconds(st.WaitingSince) != waits || st.Port != c.Port(k) || !errors.Is(st.Err, err) || err == nil && st.Err != nil {
			t.Errorf("%s: since %s, waits since %s, error %v; want %s, %s, %v", k, seconds(st.Since), seconds(st.WaitingSince), st.Err, since, waits, err)
		}
	}
	sync := func(from ...error) {
		time.Sleep(time.Second)
		answers = from
		c.Sync(t.Context())
		if len(answers) != 0 {
			t.Errorf("%d answers are left", len(answers))
		}
	}
	fails := func(list ...any) error {
		p := &PartialError{Failed: map[tracker.Key]error{}}
		for i := 0; i < len(list); i += 2 {
			p.Failed[list[i].(tracker.Key)] = list[i+1].(error)
		}
		return p
	}
	check(a, "never", "never", nil)
	tr.SetService(service("a", "172.30.0.1"))
	tr.SetSlice(slice("a", "10.0.0.1"))
	e.Snapshot()
	check(a, "never", "0s", nil)
	sync() // at 1 s
	check(a, "1s", "never", nil)

	// What is in effect stays in effect while a newer version fails.
	full := errors.New("table full")
	tr.SetSlice(slice("a", "10.0.0.1", "10.0.0.2"))
	e.Snapshot()
	check(a, "1s", "1s", nil)
	sync(fails(a, full))
	check(a, "1s", "1s", full)
	tr.SetSlice(slice("a", "10.0.0.2", "10.0.0.3"))
	sync(fails(a, full))
	check(a, "1s", "1s", full)
	other := errors.New("other")
	sync(fails(a, other))
	check(a, "1s", "1s", other)
	sync(errInjected)
	check(a, "1s", "1s", errInjected)
	sync()
	check(a, "6s", "never", nil)

	// A change is taken back.
	tr.SetService(service("a", "172.30.0.1", externalIPs("192.0.2.1")))
	sync(fails(a, full))
	check(a, "6s", "7s", full)
	tr.SetService(service("a", "172.30.0.1"))
	sync()
	check(a, "6s", "never", nil)

	// A Service that waits for another one.
	tr.SetService(service("b", "172.30.0.2", externalIPs("192.0.2.1")))
	sync()
	tr.SetService(service("a", "172.30.0.1", externalIPs("192.0.2.1")))
	sync(fails(a, full))
	check(b, "9s", "10s", full)
	if got, want := fmt.Sprint(c.Status(b).Err), "a frontend moves to default/a:p/TCP/IPv4: table full"; got != want {
		t.Errorf("error %q, want %q", got, want)
	}

	// A full delta that fails is no failure of the Services that it does not change.
	tr.SetService(service("a", "172.30.0.1"))
	sync()
	c.Resync()
	sync(errInjected)
	check(a, "6s", "never", nil)
	sync()

	// A removal that fails, and one of a Service that was never in effect.
	tr.DeleteService(types.NamespacedName{Namespace: "default", Name: "a"})
	sync(fails(a, errInjected))
	check(a, "6s", "14s", errInjected)
	sync()
	check(a, "never", "never", nil)
	tr.SetService(service("c", "172.30.0.3"))
	sync(fails(key("c", tracker.IPv4), full))
	tr.DeleteService(types.NamespacedName{Namespace: "default", Name: "c"})
	tr.SetService(service("d", "172.30.0.4"))
	e.Snapshot()
	check(key("c", tracker.IPv4), "never", "16s", full)
	check(key("d", tracker.IPv4), "never", "16s", nil)
	sync()
	if len(c.failures) != 0 {
		t.Errorf("%d failures are left", len(c.failures))
	}
	c.Detach()
	check(b, "never", "never", nil)
}
