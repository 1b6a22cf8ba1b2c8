package vm

import (
	"errors"
	"os/exec"
	"testing"
	"time"
)

// TestUnstartedMachineIsNoFailure runs commands that do not start a test.
func TestUnstartedMachineIsNoFailure(t *testing.T) {
	for _, script := range []string{"exec sleep 600", "exit 1"} {
		c := &command{exec.Command("sh", "-c", script), 100 * time.Millisecond, func() (int, error) { return 0, errors.New("no status") }}
		if c.run(t) {
			t.Errorf("%q ran the test", script)
		}
	}
}
