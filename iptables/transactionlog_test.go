package iptables

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// TestTransactionsAreLogged compares the log at LevelTransaction with what iptables-restore was called with.
func TestTransactionsAreLogged(t *testing.T) {
	t.Parallel()
	for _, level := range []slog.Level{dataplane.LevelTransaction, slog.LevelDebug} {
		var log bytes.Buffer
		r, w := newWatched(t, system{NFT, true}, func(c *Config) {
			c.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level}))
		})
		r.everyKind()
		w.calls()
		r.sync()
		var rules []string
		for _, line := range w.calls() {
			_, rule, _ := strings.Cut(line, " ")
			if strings.HasPrefix(rule, "-A KUBE-") && !strings.Contains(rule, `"`) { // the log quotes those
				rules = append(rules, rule)
			}
		}
		has := func(line string) bool { return strings.Contains(log.String(), line) }
		switch {
		case level == slog.LevelDebug && slices.ContainsFunc(rules, has):
			t.Error("the log has transactions at level DEBUG")
		case level != slog.LevelDebug && (len(rules) < 20 || slices.ContainsFunc(rules, func(l string) bool { return !has(l) })):
			t.Errorf("the log lacks some of %d rules", len(rules))
		}
	}
}
