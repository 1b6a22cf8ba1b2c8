//go:build linux

package ipvs

import (
	"context"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// iptables runs the iptables tools of a family. They are the one thing that is
// done by programs: the kernel's interface for these rules is theirs alone.
type iptables struct {
	variant IPTables
	family  tracker.Family
	netns   int // as [Config.NetNS]
}

func (t iptables) program(what string) string {
	name := "iptables"
	if t.family == tracker.IPv6 {
		name = "ip6tables"
	}
	switch t.variant {
	case NFTables:
		name += "-nft"
	case LegacyTables:
		name += "-legacy"
	}
	return name + "-" + what
}

// save returns what all tables hold.
func (t iptables) save(ctx context.Context) (string, error) {
	return t.run(ctx, "", t.program("save"))
}

// restore applies rules without touching any chain they do not name.
func (t iptables) restore(ctx context.Context, input string) error {
	// -w waits for others that change the same tables.
	_, err := t.run(ctx, input, t.program("restore"), "--noflush", "-w", "10")
	return err
}

func (t iptables) run(ctx context.Context, input, program string, args ...string) (string, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdin = strings.NewReader(input)
	var out, diag strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &diag
	// A program that waits for others must not write what a killed agent wanted when
	// the next one has already read the tables. The signal comes when the thread that
	// started it ends, which is therefore kept.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	// What a program has written is still being read when it has ended.
	cmd.WaitDelay = 30 * time.Second
	if err := within(t.netns, cmd.Start); err != nil {
		return "", fmt.Errorf("%s: %w", program, err)
	}
	if err := cmd.Wait(); err != nil {
		return "", fmt.Errorf("%s: %w: %s", program, err, strings.TrimSpace(diag.String()))
	}
	return out.String(), nil
}
