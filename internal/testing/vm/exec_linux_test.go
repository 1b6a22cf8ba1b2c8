package vm_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// TestExecReturnsStatusAndOutput runs a test that fails in a machine.
func TestExecReturnsStatusAndOutput(t *testing.T) {
	if os.Getenv(endEnv) != "" {
		t.Skip("runs in the machine already")
	}
	testtime.NeedThorough(t)
	t.Setenv(endEnv, "fail")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	status, err := vm.Exec(t.Context(), program, []string{"-test.run=^TestMachineChild$", "-test.testlogfile=/nowhere/log"}, &out)
	netlab.Need(t, !errors.Is(err, vm.ErrMissing), fmt.Sprintf("a virtual machine: %v", err))
	if err != nil {
		t.Fatal(err)
	}
	if status != 1 || !bytes.Contains(out.Bytes(), []byte("failed in the machine")) {
		t.Errorf("status %d, output:\n%s", status, out.Bytes())
	}
}
