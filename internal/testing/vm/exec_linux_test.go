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

// TestExecReturnsStatusAndOutput runs a test that fails in a machine, and then none.
func TestExecReturnsStatusAndOutput(t *testing.T) {
	testtime.NeedThorough(t) // the tests in machines show it, too
	t.Setenv(childEnv, "1")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	status, err := vm.Exec(t.Context(), [][]string{
		{program, "-test.run=^TestChildFails$", "-test.testlogfile=/nowhere/log"}, {program, "-test.run=^TestOther$"},
	}, &out)
	netlab.Need(t, !errors.Is(err, vm.ErrMissing), fmt.Sprintf("a virtual machine: %v", err))
	if err != nil {
		t.Fatal(err)
	}
	if status != 1 || !bytes.Contains(out.Bytes(), []byte("failed in the machine")) || !bytes.HasSuffix(out.Bytes(), []byte("PASS\n")) {
		t.Errorf("status %d, output:\n%s", status, out.Bytes())
	}
}
