package objects

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// wrongAnnotations has a wrong value for each annotation that nodeproxy reads, and the kind of its
// object.
func wrongAnnotations() map[string]struct{ kind, value string } {
	return map[string]struct{ kind, value string }{
		annotations.Balance:      {"Service", "sideways"},
		annotations.Slots:        {"Service", "0"},
		annotations.PreferLocal:  {"Service", "maybe"},
		annotations.Weight:       {"EndpointSlice", "heavy"},
		annotations.Scheduler:    {"Service", "rr,sometimes"},
		annotations.Forwarding:   {"Service", "far"},
		annotations.Weights:      {"EndpointSlice", "10.1.0.2=-1"},
		annotations.CiliumWeight: {"EndpointSlice", "65536"},
	}
}

// TestWrongAnnotationsAreReportedAndIgnored gives each annotation a wrong value, and a right one that
// is not allowed. An Event and a log line must name it, and the Service must work as without it. An
// annotation of another project that is not allowed is not reported.
func TestWrongAnnotationsAreReportedAndIgnored(t *testing.T) {
	cases := wrongAnnotations()
	if len(cases) != len(annotations.Known()) {
		t.Errorf("%d annotations have a case, of %q", len(cases), annotations.Known())
	}
	for name, c := range cases {
		for _, allowed := range []bool{true, false} {
			known := strings.TrimPrefix(name, "go-proxier.github.io/")
			args := []string{"--proxy-mode", config.ModeIPTables}
			if allowed {
				args = append(args, "--allow-annotations", known)
			}
			events := eventMessages{}
			w, log, cursor, _ := newWorld(t, WorldHooks{Events: events}, args...)
			s, port, targetPort := web("web", "10.96.0.1"), "p", int32(8080)
			slice := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &port, Port: &targetPort}}}
			slice.ObjectMeta = metav1.ObjectMeta{Namespace: "ns", Name: "web-a", UID: "v", Labels: map[string]string{discovery.LabelServiceName: "web"}}
			slice.Endpoints = []discovery.Endpoint{{Addresses: []string{"10.1.0.1"}}, {Addresses: []string{"10.1.0.2"}}}
			value := map[string]string{name: c.value}
			if c.kind == "Service" {
				s.Annotations = value
			} else {
				slice.Annotations = value
			}
			w.SetService(s)
			w.SetSlice(slice)
			must.Do(t, cursor.Sync(t.Context()))
			foreign := name == annotations.CiliumWeight && !allowed
			if named := strings.Contains(strings.Join(events[c.kind], "\n"), name); named == foreign || len(events) > 1 {
				t.Errorf("%s, allowed %v: events %q", name, allowed, events)
			}
			if strings.Contains(log.String(), name) == foreign {
				t.Errorf("%s, allowed %v: log %s", name, allowed, log.String())
			}
			all := w.Engine.Snapshot().Ports
			if len(all) != 1 || len(all[0].Selection.Reachable) != 2 || all[0].Spec.Hash != tracker.HashNone || all[0].Spec.HashBuckets != 0 || all[0].Spec.PreferLocal {
				t.Fatalf("%s, allowed %v: %+v", name, allowed, all)
			}
			if eps := all[0].Endpoints; eps[0].Weight != eps[1].Weight || eps[0].Weight == 0 {
				t.Errorf("%s, allowed %v: weights %d and %d", name, allowed, eps[0].Weight, eps[1].Weight)
			}
		}
	}
}

func TestHookOfTheModeAddsToServicePorts(t *testing.T) {
	for _, hook := range []func(*v1.Service, *tracker.ServicePort){nil, func(s *v1.Service, p *tracker.ServicePort) { p.NeedLocalSet = true }} {
		w, _, cursor, deltas := newWorld(t, WorldHooks{OnService: hook})
		w.SetService(web("svc", "10.96.0.1"))
		must.Do(t, cursor.Sync(t.Context()))
		if got := (*deltas)[0].Changes; len(got) != 1 || got[0].New.Spec.NeedLocalSet != (hook != nil) {
			t.Errorf("%d changes, NeedLocalSet is %v", len(got), hook == nil)
		}
	}
}
