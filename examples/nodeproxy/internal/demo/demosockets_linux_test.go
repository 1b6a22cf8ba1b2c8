package demo

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestSocketLBDemoExpectationsHold runs the demo with --socket-lb. The kernel loads the programs only
// in the initial user namespace, so the tests of this package do not run in one of their own.
func TestSocketLBDemoExpectationsHold(t *testing.T) {
	c, err := newDemoCgroup(t.Context())
	netlab.Need(t, err == nil, fmt.Sprintf("root and the right to load BPF programs: %v", err))
	must.Do(t, c.close())
	var out, diag bytes.Buffer
	if status := run(t.Context(), config.ModeNFTables, true, false, &out, &diag); status != 0 {
		t.Errorf("status %d", status)
	}
	for _, want := range []string{"from one unconnected socket of pod-2", "120 connections of pods were translated at the socket", " expectations held."} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q", want)
		}
	}
	if strings.Contains(out.String(), "FAILED") || diag.Len() != 0 {
		t.Errorf("a failure, or a message to standard error")
	}
	if t.Failed() {
		t.Logf("output:\n%s%s", out.String(), diag.String())
	}
}
