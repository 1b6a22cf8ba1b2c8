package nftables

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// inputs is a handler that keeps the inputs of the transactions in a log.
type inputs struct {
	slog.Handler
	level slog.Level
	texts []string
}

func (h *inputs) Enabled(_ context.Context, l slog.Level) bool { return l >= h.level }

func (h *inputs) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "input" {
			h.texts = append(h.texts, a.Value.String())
		}
		return true
	})
	return nil
}

// TestLoggedTransactionsMakeTheTable loads the texts in the log into a kernel in memory, which must
// have the same elements as the backend's.
func TestLoggedTransactionsMakeTheTable(t *testing.T) {
	t.Parallel()
	h := &inputs{level: dataplane.LevelTransaction}
	r := newMemoryRig(t)
	r.config.Log = slog.New(h)
	r.start()
	for i := range 3 {
		r.tracker.SetService(svc(i))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(2)...))
	}
	r.sync()
	r.tracker.SetSlice(epSlice(1, tracker.IPv4, upTo(3)...))
	r.sync()
	if len(h.texts) < 2 {
		t.Fatalf("%d transactions in the log", len(h.texts))
	}
	tables := fake.New()
	for _, text := range h.texts {
		if err := tables.Load(text); err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
	}
	if n := strings.Count(tables.List(), " . 8080"); n != 7 {
		t.Errorf("%d endpoints in\n%s", n, tables.List())
	}
	h.level, h.texts = slog.LevelDebug, nil
	r.tracker.SetSlice(epSlice(1, tracker.IPv4, upTo(4)...))
	r.sync()
	if len(h.texts) != 0 {
		t.Errorf("transactions at level DEBUG: %q", h.texts)
	}
}
