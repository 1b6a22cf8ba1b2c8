package objects

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// eventMessages is an event sink that stores the messages by the kind of their object.
type eventMessages map[string][]string

func (e eventMessages) Event(o v1.ObjectReference, _ bool, _, message string) {
	e[o.Kind] = append(e[o.Kind], message)
}

// newWorld returns a World of a command line that has listed all objects, what it logs from now on, and a cursor of a
// Backend that stores its deltas.
func newWorld(t *testing.T, hooks WorldHooks, args ...string) (w *World, log *bytes.Buffer, cursor *ruleset.Cursor, deltas *[]*ruleset.Delta) {
	t.Helper()
	log, deltas = &bytes.Buffer{}, new([]*ruleset.Delta)
	w = must.Get(New(configtest.Parsed(t, append([]string{"run", "--hostname-override", "n1"}, args...)), nil, nil, hooks, slog.New(slog.NewTextHandler(log, nil))))(t)
	log.Reset()
	cursor = w.Engine.Attach("test", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		*deltas = append(*deltas, d)
		return nil
	}))
	w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return w, log, cursor, deltas
}

// web returns a Service with one port.
func web(name, clusterIP string) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: "u"},
		Spec: v1.ServiceSpec{
			ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Name: "p", Port: 80}},
		},
	}
}

// TestLogOfAnObjectIsBounded changes large invalid objects a hundred times each and measures
// log and events.
func TestLogOfAnObjectIsBounded(t *testing.T) {
	large := strings.Repeat("x", 120_000)
	service := func(edit func(*v1.Service)) *v1.Service {
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "tenant", Name: "evil", UID: "u"}}
		s.Spec.ClusterIP, s.Spec.ClusterIPs = "10.96.0.1", []string{"10.96.0.1", "fd00:96::1"}
		s.Spec.IPFamilies = []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}
		for i := range 300 {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(1000 + i)})
		}
		edit(s)
		return s
	}
	slice := func(edit func(*discovery.EndpointSlice)) *discovery.EndpointSlice {
		name := "p"
		s := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4}
		s.ObjectMeta = metav1.ObjectMeta{Namespace: "tenant", Name: "evil-a", UID: "u", Labels: map[string]string{discovery.LabelServiceName: "evil"}}
		for i := range 50 {
			port := int32(1000 + i)
			name := fmt.Sprint(name, i)
			s.Ports = append(s.Ports, discovery.EndpointPort{Name: &name, Port: &port})
		}
		s.Endpoints = make([]discovery.Endpoint, 50)
		for i := range s.Endpoints {
			s.Endpoints[i].Addresses = []string{fmt.Sprintf("10.1.%d.%d", i/250, i%250)}
		}
		edit(s)
		return s
	}
	for _, c := range []struct {
		name    string
		service *v1.Service
		slice   *discovery.EndpointSlice
	}{
		{name: "annotations", service: service(func(s *v1.Service) {
			s.Annotations = map[string]string{annotations.Balance: large, annotations.Slots: large}
		})},
		{name: "ports", service: service(func(s *v1.Service) {
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].Name, s.Spec.Ports[i].Protocol = large[i:i+1000], v1.Protocol(large)
			}
		})},
		{name: "addresses", service: service(func(s *v1.Service) {
			s.Spec.ExternalIPs, s.Spec.LoadBalancerSourceRanges = []string{large, "y" + large}, []string{large, "z" + large}
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: large}}
			s.Annotations = map[string]string{"a": large}
		})},
		{name: "weights", slice: slice(func(s *discovery.EndpointSlice) {
			s.Annotations = map[string]string{annotations.Weights: large, annotations.Weight: large, v1.EndpointsLastChangeTriggerTime: large}
		})},
		{name: "endpoints", slice: slice(func(s *discovery.EndpointSlice) {
			for i := range s.Endpoints {
				s.Endpoints[i].Addresses = []string{large[:4000+i]}
			}
		})},
		{name: "type", slice: slice(func(s *discovery.EndpointSlice) { s.AddressType = discovery.AddressType(large) })},
	} {
		for _, allowed := range []string{"", "balance,balance-slots,weight,weights"} {
			events := eventMessages{}
			w, log, cursor, _ := newWorld(t, WorldHooks{Events: events}, "--allow-annotations", allowed)
			for i := range 100 {
				if c.service != nil {
					c.service.ResourceVersion = fmt.Sprint(i)
					w.SetService(c.service)
				}
				if c.slice != nil {
					c.slice.ResourceVersion = fmt.Sprint(i)
					w.SetSlice(c.slice)
				}
				must.Do(t, cursor.Sync(t.Context()))
			}
			messages := slices.Concat(slices.Collect(maps.Values(events))...)
			if size := len(strings.Join(messages, "")); log.Len() == 0 || log.Len() > 4000 || size > 4000 || len(messages) == 0 {
				t.Errorf("%s, allowed %q: %d bytes of log and %d of %d events", c.name, allowed, log.Len(), size, len(messages))
			}
			for line := range strings.Lines(log.String()) {
				if len(line) > 1500 {
					t.Errorf("%s: a line of %d bytes", c.name, len(line))
				}
			}
		}
	}
}

// TestEngineAndTrackerReportToOneHook has a Service with a mistake, and an external IP of another.
func TestEngineAndTrackerReportToOneHook(t *testing.T) {
	got := map[tracker.Reason]int{}
	hooks := WorldHooks{LeftOut: func(_ v1.ObjectReference, left []tracker.LeftOut) {
		for _, l := range left {
			got[l.Reason]++
		}
	}}
	w, _, _, _ := newWorld(t, hooks)
	for i, name := range []string{"a", "b"} {
		s := web(name, fmt.Sprint("10.96.0.", i+1))
		s.Spec.ExternalIPs = []string{"192.0.2.1"}
		if i == 1 {
			s.Spec.SessionAffinity = "clientIP"
		}
		w.SetService(s)
	}
	w.Engine.Snapshot()
	if len(got) != 2 || got[tracker.ReasonFrontendConflict] != 1 || got[tracker.ReasonInvalid] != 1 {
		t.Errorf("the hook got %v", got)
	}
}

// TestLinesAboutManifestsAreBounded reads a hundred Services without clusterIP and with an unknown
// protocol. The agent logs some of them; the verbs that store what is wrong with objects log none.
func TestLinesAboutManifestsAreBounded(t *testing.T) {
	dir := t.TempDir()
	var text strings.Builder
	for i := range 100 {
		fmt.Fprintf(&text, "apiVersion: v1\nkind: Service\nmetadata: {name: web-%d}\nspec: {ports: [{name: http, port: 80, protocol: tcp}]}\n---\n", i)
	}
	text.WriteString("apiVersion: v1\nkind: Service\n")
	must.Do(t, os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(text.String()), 0o600))
	for _, keep := range []bool{false, true} {
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
		cfg := configtest.Parsed(t, []string{"run", "--manifests", dir, "--hostname-override", "n1"})
		f := must.Get(newFiles(cfg, logger))(t)
		defer f.Close()
		w := must.Get(New(cfg, nil, nil, WorldHooks{Keep: keep}, logger))(t)
		f.handInFirst(w)
		if keep {
			if log.Len() != 0 || len(w.Problems()) != 101 || len(w.LeftOut("Service", types.NamespacedName{Namespace: "default", Name: "web-99"})) != 1 {
				t.Errorf("%d problems, log:\n%s", len(w.Problems()), log.String())
			}
			continue
		}
		const line = `msg="an object of the manifests is not as an API server would have it" object="`
		const first = `all.yaml:1: Service default/web-0: an API server would refuse it: port \"http\": protocol \"tcp\" is unknown; an API server would set what it lacks: clusterIP`
		if strings.Count(log.String(), line) != maxProblems || !strings.Contains(log.String(), first) || !strings.Contains(log.String(), "objects=80") {
			t.Errorf("log:\n%s", log.String())
		}
	}
}
