package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// boots is the number of attempts to boot a machine. An emulated machine sometimes
	// hangs at boot.
	boots = 3
	// bootTime bounds an attempt, which takes some seconds on idle processors.
	bootTime = 2 * time.Minute
)

// command is a test process in a machine or in a namespace of this one.
type command struct {
	*exec.Cmd
	// startTimeout bounds the time until a machine starts the test. It is 0 for a command that
	// is not a machine.
	startTimeout time.Duration
	// status returns the test's exit status after the end of Cmd, or an error if it has
	// none.
	status func() (int, error)
}

// started is the line that a machine writes before it starts the test.
const started = "starting"

// start starts the command, which ends with the calling thread, and returns its output. It
// reports false if a machine does not start the test in time; the machine is killed then.
func (c *command) start() (lines *bufio.Reader, ok bool, err error) {
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Pdeathsig = syscall.SIGKILL
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, false, err
	}
	c.Stderr = c.Stdout
	if err := c.Start(); err != nil {
		return nil, false, err
	}
	lines = bufio.NewReader(out)
	if c.startTimeout == 0 {
		return lines, true, nil
	}
	timer := time.AfterFunc(c.startTimeout, func() { c.Process.Kill() })
	first, _ := lines.ReadString('\n')
	return lines, timer.Stop() && first == started+"\n", nil
}

// ErrMissing is wrapped by errors about a program or a kernel that a machine needs and this
// system lacks.
var ErrMissing = errors.New("cannot boot a virtual machine")

// host holds this system's means to run virtual machines.
type host struct {
	qemu   string
	kernel *kernel
}

// findHost returns this system's host. The error wraps ErrMissing.
func findHost() (*host, error) {
	k, err := findKernel()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMissing, err)
	}
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMissing, err)
	}
	if _, err := exec.LookPath("busybox"); err != nil {
		return nil, fmt.Errorf("%w (package busybox-static): %w", ErrMissing, err)
	}
	return &host{qemu, k}, nil
}

// boot returns the command that boots a virtual machine and runs the test binary with the
// arguments in it. dir is an empty folder for the machine's files.
func (h *host) boot(ctx context.Context, dir, program string, args []string) (*command, error) {
	fd, err := unix.MemfdCreate("image", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("vm: %w", err)
	}
	image := os.NewFile(uintptr(fd), "image")
	if err := writeImage(image, h.kernel, program, args, environment()); err != nil {
		image.Close()
		return nil, fmt.Errorf("vm: image: %w", err)
	}
	console, status := filepath.Join(dir, "console"), filepath.Join(dir, "status")
	cmd := exec.CommandContext(ctx, h.qemu,
		"-accel", "tcg,thread=multi", "-smp", "2", "-m", "3072",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", h.kernel.image, "-initrd", "/dev/fd/3",
		// The guest's check of its timer fails on a busy host. A kernel that hangs writes
		// the stacks of its processors and ends, within two minutes. With a watchdog_thresh of 30
		// one hung for longer: each warning about a stalled RCU seems to put the watchdog off.
		"-append", "console=ttyS0 panic=-1 loglevel=5 no_timer_check watchdog_thresh=20 softlockup_panic=1 softlockup_all_cpu_backtrace=1",
		"-chardev", "file,id=console,path="+console, "-serial", "chardev:console",
		"-chardev", "stdio,id=out,signal=off", "-serial", "chardev:out",
		"-chardev", "file,id=status,path="+status, "-serial", "chardev:status")
	cmd.ExtraFiles = []*os.File{image}
	context.AfterFunc(ctx, func() { image.Close() })
	return &command{cmd, bootTime, func() (int, error) {
		text, err := os.ReadFile(status)
		code := 0
		if err == nil {
			_, err = fmt.Sscanf(string(text), "status %d", &code)
		}
		if err == nil {
			return code, nil
		}
		log, _ := os.ReadFile(console)
		if len(log) > 4000 {
			log = log[len(log)-4000:]
		}
		return 0, fmt.Errorf("the machine ended without the test's status; its console:\n%s", log)
	}}, nil
}
