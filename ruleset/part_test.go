package ruleset

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// partLog is a backend that stores what a plane with single entries would do.
type partLog struct {
	limits  Limits
	written []string
}

func (p *partLog) Limits(tracker.Family) Limits { return p.limits }

func (p *partLog) Apply(_ context.Context, d *Delta) error {
	add := func(format string, args ...any) { p.written = append(p.written, fmt.Sprintf(format, args...)) }
	for _, c := range d.Changes {
		for f := range c.GoneFrontends() {
			add("-%s %s", c.Key.Name, f.Addr)
		}
		for f, to := range c.LostFrontends() {
			add("%s %s to %s", c.Key.Name, f.Addr, to.Name)
		}
		for i := 0; c.New != nil && i < len(c.New.Frontends); i++ {
			f := &c.New.Frontends[i]
			if c.Old == nil || !slices.ContainsFunc(c.Old.Frontends, func(o Frontend) bool { return equalFrontends(o, *f) }) {
				add("+%s %s", c.Key.Name, f.Addr)
			}
		}
	}
	for _, t := range d.Triggers {
		add("trigger %s", t.Service.Name)
	}
	return nil
}

// TestPartsOfOneRuleset moves an external IP and a Service between two planes.
func TestPartsOfOneRuleset(t *testing.T) {
	tr, e, ev := worldWithEvents(t, slog.New(slog.DiscardHandler))
	left, right, follower := &partLog{}, &partLog{}, &partLog{}
	left.limits = Limits{Endpoints: 1}
	planes := []*Cursor{
		e.AttachPart("left", left, func(s *Port) bool { return s.Spec.Ext != nil }),
		e.AttachPart("right", right, func(s *Port) bool { return s.Spec.Ext == nil }),
	}
	planes = append(planes, planes[0].Follow("follower", follower))
	set := func(name, ip, ext string, created int64) {
		tr.SetService(service(name, ip, externalIPs("192.0.2.1"), func(s *v1.Service) {
			s.CreationTimestamp = metav1.Unix(created, 0)
			s.Annotations = map[string]string{"ext": ext}
		}))
	}
	step := func(what, wantLeft, wantRight string) {
		t.Helper()
		for _, c := range planes {
			if err := c.Sync(t.Context()); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
		}
		for _, p := range []struct {
			name string
			*partLog
			want string
		}{{"left", left, wantLeft}, {"right", right, wantRight}, {"follower", follower, wantLeft}} {
			if got := strings.Join(p.written, ", "); got != p.want {
				t.Errorf("%s: plane %s has written %q, want %q", what, p.name, got, p.want)
			}
			p.written = nil
		}
	}
	set("a", "172.30.0.1", "x", 1)
	set("b", "172.30.0.2", "", 2)
	step("conflict", "+a 172.30.0.1, +a 192.0.2.1", "+b 172.30.0.2")
	if got := ev.take(); len(got) != 1 || !strings.Contains(got[0], "192.0.2.1 port 80 (TCP) belongs to") {
		t.Errorf("events %q", got)
	}
	busy := func(service string) {
		s := slice(service, "10.0.0.1", "10.0.0.2")
		s.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Add(time.Minute).Format(time.RFC3339Nano)}
		tr.SetSlice(s)
	}
	busy("b")
	step("endpoints of b", "", "+b 172.30.0.2, trigger b")
	if got := ev.take(); len(got) != 0 {
		t.Errorf("events %q for the limits of another plane", got)
	}
	busy("a")
	step("endpoints of a", "+a 172.30.0.1, +a 192.0.2.1, trigger a", "")
	if got := ev.take(); len(got) != 1 || !strings.Contains(got[0], "2 endpoints are more than 1") {
		t.Errorf("events %q", got)
	}
	set("a", "172.30.0.1", "", 1)
	step("a moves", "-a 172.30.0.1, -a 192.0.2.1", "+a 172.30.0.1, +a 192.0.2.1")
	set("b", "172.30.0.2", "xx", 2)
	step("b moves", "+b 172.30.0.2", "-b 172.30.0.2")
	tr.DeleteService(types.NamespacedName{Namespace: "default", Name: "a"})
	step("the external IP moves", "+b 192.0.2.1", "-a 172.30.0.1, -a 192.0.2.1")
	set("a", "172.30.0.1", "", 1)
	step("and back", "-b 192.0.2.1", "+a 172.30.0.1, +a 192.0.2.1")

	late := &partLog{}
	if err := e.AttachPart("late", late, func(s *Port) bool { return s.Key.Name == "b" }).Sync(t.Context()); err != nil || !slices.Equal(late.written, []string{"+b 172.30.0.2"}) {
		t.Errorf("error %v, a plane that is attached later has written %q", err, late.written)
	}
}
