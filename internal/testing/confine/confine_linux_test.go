package confine_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) {
	confine.Roles{
		"report": report,
		"fail":   func() error { return errors.New("the role failed") },
	}.Enter()
	netlab.Main(m)
}

// report prints the capabilities and the limit of files of the process.
func report() error {
	caps, err := confine.Effective()
	if err != nil {
		return err
	}
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return err
	}
	fmt.Print(caps, " ", files.Cur)
	return nil
}

func TestCommandRunsWithLimits(t *testing.T) {
	netlab.Require(t)
	few := uint64(17)
	for _, c := range []struct {
		limits confine.Limits
		want   string
	}{
		{confine.Limits{Files: &few}, "[] 17"},
		{confine.Limits{Files: &few, Capabilities: []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW}}, "[12 13] 17"},
	} {
		out, err := confine.Command("report", c.limits).Output()
		if err != nil || string(out) != c.want {
			t.Errorf("%v: %q, %v, want %q", c.limits, out, err, c.want)
		}
	}
}

func TestRoleErrorEndsProcess(t *testing.T) {
	netlab.Require(t)
	for role, want := range map[string]string{"fail": "the role failed", "none": `no role "none"`} {
		var said strings.Builder
		cmd := confine.Command(role, confine.Limits{})
		cmd.Stderr = &said
		if err := cmd.Run(); err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(said.String(), want) {
			t.Errorf("%s: %v, %q", role, err, said.String())
		}
	}
	// Without a Command, Enter does nothing.
	if _, confined := os.LookupEnv("PROXIER_CONFINED_ROLE"); confined {
		t.Error("the test itself is confined")
	}
	all, err := confine.Effective()
	if err != nil || !slices.Contains(all, unix.CAP_SYS_ADMIN) {
		t.Errorf("the test has %v, %v", all, err)
	}
}
