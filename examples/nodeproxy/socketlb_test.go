package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/internal/netlab"
)

// TestDemoNeedsRootForSocketLB runs in the user namespace of the tests, where the kernel does
// not load programs.
func TestDemoNeedsRootForSocketLB(t *testing.T) {
	netlab.Require(t)
	dir, closeDir, err := socketlb.TemporaryDir()
	if err == nil {
		err = errors.Join(socketlb.Probe(t.Context(), socketlb.Config{Dir: dir}), closeDir())
	}
	if err == nil {
		t.Skip("programs can be loaded here")
	}
	var out, diag bytes.Buffer
	if status := demo(t.Context(), []string{"--socket-lb"}, &out, &diag); status != exitNoSpaces {
		t.Errorf("status %d", status)
	}
	if !strings.Contains(diag.String(), "CAP_BPF") || !strings.Contains(diag.String(), "needs root") {
		t.Errorf("standard error:\n%s", diag.String())
	}
}
