package confine_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/internal/netlab"
)

func TestMain(m *testing.M) {
	confine.Roles{
		"tell": tell,
		"fail": func() error { return errors.New("as it was told") },
	}.Enter()
	netlab.Main(m)
}

// tell says what the process has.
func tell() error {
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

func TestLimits(t *testing.T) {
	netlab.Require(t)
	few := uint64(17)
	for _, c := range []struct {
		limits confine.Limits
		want   string
	}{
		{confine.Limits{Files: &few}, "[] 17"},
		{confine.Limits{Files: &few, Capabilities: []int{unix.CAP_NET_ADMIN, unix.CAP_NET_RAW}}, "[12 13] 17"},
	} {
		out, err := confine.Command("tell", c.limits).Output()
		if err != nil || string(out) != c.want {
			t.Errorf("%v: %q, %v, want %q", c.limits, out, err, c.want)
		}
	}
}

func TestErrors(t *testing.T) {
	netlab.Require(t)
	for role, want := range map[string]string{"fail": "as it was told", "none": `no role "none"`} {
		var said strings.Builder
		cmd := confine.Command(role, confine.Limits{})
		cmd.Stderr = &said
		if err := cmd.Run(); err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(said.String(), want) {
			t.Errorf("%s: %v, %q", role, err, said.String())
		}
	}
	// Without being told, nothing happens.
	if _, told := os.LookupEnv("PROXIER_CONFINED_ROLE"); told {
		t.Error("the test itself is confined")
	}
	all, err := confine.Effective()
	if err != nil || !slices.Contains(all, unix.CAP_SYS_ADMIN) {
		t.Errorf("the test has %v, %v", all, err)
	}
}
