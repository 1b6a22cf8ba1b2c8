package objects

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// eventMessages is an event sink that stores the kind of each object and the message.
type eventMessages map[string]string

func (e eventMessages) Event(o v1.ObjectReference, warning bool, _, message string) {
	if warning {
		e[o.Kind] += message + "\n"
	}
}

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
			args := []string{"run", "--hostname-override", "n1", "--proxy-mode", config.ModeIPTables}
			if allowed {
				args = append(args, "--allow-annotations", known)
			}
			var log bytes.Buffer
			events := eventMessages{}
			w := must.Get(New(configtest.Parsed(t, args), nil, nil, WorldHooks{Events: events}, slog.New(slog.NewTextHandler(&log, nil))))(t)
			log.Reset()
			cursor := w.Engine.Attach("test", ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
			w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)

			port, targetPort := "p", int32(8080)
			s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "u"}}
			s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.IPFamilies = "10.96.0.1", []string{"10.96.0.1"}, []v1.IPFamily{v1.IPv4Protocol}
			s.Spec.Ports = []v1.ServicePort{{Name: port, Port: 80}}
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
			if named := strings.Contains(events[c.kind], name); named == foreign || len(events) > 1 {
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
		c := configtest.Parsed(t, []string{"run", "--cluster-cidr=10.0.0.0/8"})
		w := must.Get(New(c, []tracker.Family{tracker.IPv4}, nil, WorldHooks{OnService: hook}, slog.New(slog.DiscardHandler)))(t)
		var got []bool
		cursor := w.Engine.Attach("test", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
			for _, c := range d.Changes {
				got = append(got, c.New.Spec.NeedLocalSet)
			}
			return nil
		}))
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "svc", UID: "1"}}
		s.Spec.ClusterIP, s.Spec.ClusterIPs, s.Spec.Ports = "10.96.0.1", []string{"10.96.0.1"}, []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}
		s.Spec.IPFamilies = []v1.IPFamily{v1.IPv4Protocol}
		w.SetService(s)
		w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		must.Do(t, cursor.Sync(t.Context()))
		if want := hook != nil; len(got) != 1 || got[0] != want {
			t.Errorf("NeedLocalSet is %v, want %v", got, want)
		}
	}
}
