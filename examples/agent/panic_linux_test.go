package agent_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// panicking is a log, and a sink of Events, that panics.
type panicking struct{ slog.Handler }

func (panicking) Enabled(_ context.Context, l slog.Level) bool { return l == slog.LevelWarn }

func (panicking) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "Node object was deleted") {
		panic("ouch")
	}
	return nil
}

func (panicking) Event(v1.ObjectReference, bool, string, string) { panic("ouch") }

// panickingRegistry panics when metrics are removed.
type panickingRegistry struct{ *prometheus.Registry }

func (panickingRegistry) Unregister(prometheus.Collector) bool { panic("ouch") }

// TestAgentGoesOnWithoutWhatItDoesNotNeed gives an agent nil objects, objects of a wrong type, and and a sink of Events and
// a registry that panic.
func TestAgentGoesOnWithoutWhatItDoesNotNeed(t *testing.T) {
	h := netlab.NewHost(t)
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}}
	for name, source := range map[string]agent.Source{
		"nil": func(ctx context.Context, to *agent.Objects) error {
			to.SetService(nil)
			to.SetSlice(nil)
			to.SetNode(nil)
			to.SetServiceCIDR(nil)
			return objects("10.0.0.1")(ctx, to)
		},
		"another type": func(ctx context.Context, to *agent.Objects) error {
			informer := informers.NewSharedInformerFactory(fake.NewClientset(pod), 0).Core().V1().Pods().Informer()
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() { informer.RunWithContext(ctx) })
			wg.Go(func() { _ = agent.Informers(informer, informer, informer, informer)(ctx, to) })
			return objects("10.0.0.1")(ctx, to)
		},
	} {
		t.Run(name, func(t *testing.T) {
			check := leftovers(t)
			var log buffer
			stop := runAgent(t, agent.Options{
				Config: parse(t, "--hostname-override", "n1"), NetNS: h.File(), Events: panicking{}, Source: source,
				Backend: agent.Discard, Registerer: panickingRegistry{prometheus.NewRegistry()},
				Log: slog.New(slog.NewTextHandler(&log, nil)),
			})
			eventually(t, "a line for each kind, and one about Events", func() bool {
				text := log.String()
				return strings.Count(text, `msg="ignored `) == map[string]int{"nil": 1, "another type": 4}[name] && strings.Count(text, "sink of Events panicked") == 1
			})
			if err := stop(); err != nil || !strings.Contains(log.String(), "cannot close") {
				t.Errorf("Run: %v, log:\n%s", err, &log)
			}
			check()
		})
	}
}
