package ipvs

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// TestWritesAreLogged compares the log at LevelTransaction with what the namespace then has.
func TestWritesAreLogged(t *testing.T) {
	t.Parallel()
	for _, level := range []slog.Level{dataplane.LevelTransaction, slog.LevelDebug} {
		var log bytes.Buffer
		m := newMemory()
		r := newRigOn(t, memoryNode{m}, Config{Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: level}))})
		r.set(svc(1, nodePort(30001), externalIPs("198.18.0.1")), 1, 2, 3)
		r.sync()
		r.set(svc(1), 1, 2)
		r.sync()
		if level == slog.LevelDebug {
			if strings.Contains(log.String(), "ipvsadm") {
				t.Error("the log has writes at level DEBUG")
			}
			continue
		}
		lines := 0
		for _, o := range objects(t, memoryNode{m}) {
			if o = strings.TrimSpace(o); strings.HasSuffix(o, "-w 0") {
				o = strings.Replace(o, "-a ", "-e ", 1) // a change of a real server, which drains
			}
			if len(o) > 5 && o[2:5] == " -t" || strings.HasPrefix(o, "add KUBE") {
				lines++
				if !strings.Contains(log.String(), o) {
					t.Errorf("the log lacks %q", o)
				}
			}
		}
		for _, line := range []string{"-D -t 198.18.0.1:80", "addr del 198.18.0.1/32 dev kube-ipvs0", "addr add 198.18.0.1/32 dev kube-ipvs0", "-A KUBE-IPVS-IN", "net.ipv4.vs.conntrack = 1", "link add kube-ipvs0 type dummy"} {
			if !strings.Contains(log.String(), line) {
				t.Errorf("the log lacks %q", line)
			}
		}
		if t.Logf("%d lines", lines); lines < 5 {
			t.Errorf("only %d objects were compared", lines)
		}
		log.Reset()
		must.Do(t, r.backend.cleanup(t.Context()))
		if got := log.String(); !strings.Contains(got, "delete table inet "+marksTable) || strings.Contains(got, "chain input") {
			t.Errorf("the log of a clean-up does not delete the marks' table: %s", got)
		}
	}
}
