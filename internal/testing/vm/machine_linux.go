package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// boots is the number of attempts to boot a machine. An emulated machine with several processors
// sometimes hangs at boot.
const boots = 3

// processorsEnv names the number of processors of an emulated machine. Several take turns with
// the host's processors, and their clock is the host's. With one, the default, the clock counts
// instructions.
const processorsEnv = "PROXIER_VM_PROCESSORS"

// kvmEnv, if not empty, lets machines use KVM. That /dev/kvm can be opened, and qemu starts with
// it, is not enough: within some clouds' machines the processor then executes nothing.
const kvmEnv = "PROXIER_VM_KVM"

// ErrMissing is wrapped by errors about a program or a kernel that a machine needs and this
// system lacks.
var ErrMissing = errors.New("cannot boot a virtual machine")

// host holds this system's means to run virtual machines.
type host struct {
	qemu   string
	kernel *kernel
	// accelerator holds the arguments of qemu for the processors.
	accelerator []string
	// threads is the number of processors of the host that a machine uses.
	threads int
	// parallel is the number of parallel tests in a machine. Tests that wait run in parallel, but
	// not so many that they wait for emulated processors.
	parallel int
	// counted is set if the clock of machines counts instructions.
	counted bool
	// bootTime bounds an attempt to boot, which takes some seconds on an idle processor.
	bootTime time.Duration
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
	n := 1
	if text := os.Getenv(processorsEnv); text != "" {
		if n, err = strconv.Atoi(text); err != nil || n < 1 {
			return nil, fmt.Errorf("%s=%q is not a number of processors", processorsEnv, text)
		}
	}
	h := &host{qemu: qemu, kernel: k, parallel: 4, bootTime: 2 * time.Minute}
	switch {
	case os.Getenv(kvmEnv) != "":
		h.threads, h.parallel = max(n, 2), 8
		h.accelerator = []string{"-accel", "kvm"}
	case n > 1:
		h.threads = n
		h.accelerator = []string{"-accel", "tcg,thread=multi"}
	default:
		h.threads, h.counted = 1, true
		h.bootTime = time.Hour // a busy host delays it, and the kernel's watchdog ends one that hangs
		// A nanosecond for each instruction. While the processor waits, the clock jumps to the
		// next timer.
		h.accelerator = []string{"-accel", "tcg,thread=single", "-icount", "shift=0,sleep=off"}
	}
	h.accelerator = append(h.accelerator, "-smp", strconv.Itoa(h.threads))
	return h, nil
}

// machine is a virtual machine that runs one command after another.
type machine struct {
	cmd *exec.Cmd
	// commands is the machine's second serial port, and output what it writes there.
	commands io.Writer
	output   *bufio.Reader
	console  *os.File
	// counted is set if the machine's clock counts instructions.
	counted bool
	// dir is the folder whose testdata the machine has.
	dir string
	// ended is closed when the machine has ended, with state.
	ended chan struct{}
	state *os.ProcessState
}

const (
	// ready is the line that a machine writes when it waits for the first command.
	ready = "ready"
	// statusMark precedes the status of a command.
	statusMark = "\x00status "
)

// boot returns a machine with the test binaries. ctx bounds the boot alone. The machine ends with
// this process.
func (h *host) boot(ctx context.Context, programs []string) (*machine, error) {
	image, err := memory("image")
	if err != nil {
		return nil, err
	}
	defer image.Close()
	if err := writeImage(image, h.kernel, programs); err != nil {
		return nil, fmt.Errorf("vm: image: %w", err)
	}
	return h.try(ctx, image)
}

// try boots the image, several times if need be.
func (h *host) try(ctx context.Context, image *os.File) (*machine, error) {
	var err error
	for range boots {
		var m *machine
		if m, err = h.start(image); err != nil {
			return nil, err
		}
		stop := context.AfterFunc(ctx, m.kill)
		timer := time.AfterFunc(h.bootTime, m.kill)
		said, isReady := m.waitReady()
		if timer.Stop() && stop() && isReady {
			return m, nil
		}
		err = fmt.Errorf("the machine did not start in %d attempts: %w\nits output:\n%s", boots, m.end(), said)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// waitReady reads the machine's output until it is ready or ends. It returns the other lines,
// such as qemu's warnings.
func (m *machine) waitReady() (said string, isReady bool) {
	for {
		line, err := m.output.ReadString('\n')
		if line == ready+"\n" {
			return said, true
		}
		if len(said) < 2000 {
			said += line
		}
		if err != nil {
			return said, false
		}
	}
}

// start starts a machine.
func (h *host) start(image *os.File) (_ *machine, err error) {
	m := &machine{counted: h.counted, ended: make(chan struct{})}
	if m.console, err = memory("console"); err != nil {
		return nil, err
	}
	m.cmd = exec.Command(h.qemu, append(h.accelerator,
		"-m", "3072", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", h.kernel.image, "-initrd", "/dev/fd/3",
		"-append", parameters,
		"-chardev", "file,id=console,path=/dev/fd/4", "-serial", "chardev:console",
		"-chardev", "stdio,id=out,signal=off", "-serial", "chardev:out")...)
	m.cmd.ExtraFiles = []*os.File{image, m.console}
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if m.commands, err = m.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	m.cmd.Stderr = m.cmd.Stdout
	m.output = bufio.NewReader(out)
	// The machine ends with the thread that starts it, so this thread lasts as long.
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := m.cmd.Start()
		started <- err
		if err == nil {
			m.state, _ = m.cmd.Process.Wait()
			close(m.ended)
		}
	}()
	return m, <-started
}

// parameters is the kernel's command line.
//
// The guest's check of its timer fails on a busy host. A kernel that hangs writes the stacks of
// its processors and ends, within two minutes. With a watchdog_thresh of 30 one hung for longer:
// each warning about a stalled RCU seems to put the watchdog off.
const parameters = "console=ttyS0 panic=-1 loglevel=5 no_timer_check watchdog_thresh=20 softlockup_panic=1 softlockup_all_cpu_backtrace=1 mitigations=off cryptomgr.notests"

// memory returns an empty file in memory.
func memory(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("vm: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// run runs a command of the machine's shell, passes on each line of its output, and returns its
// status. If it returns an error, or ctx ends, the machine has ended.
func (m *machine) run(ctx context.Context, command string, line func(string)) (status int, err error) {
	defer context.AfterFunc(ctx, m.kill)()
	if m.counted {
		m.cmd.Process.Signal(syscall.SIGCONT)
	}
	if _, err := io.WriteString(m.commands, command+"\n"); err != nil {
		return 0, m.end()
	}
	for {
		text, err := m.output.ReadString('\n')
		text, number, ended := strings.Cut(text, statusMark)
		if text != "" {
			line(text)
		}
		if err != nil {
			return 0, m.end()
		}
		if !ended {
			continue
		}
		if m.counted {
			// The clock of a machine that waits for a command would run as fast as it can.
			m.cmd.Process.Signal(syscall.SIGSTOP)
		}
		return strconv.Atoi(strings.TrimSpace(number))
	}
}

func (m *machine) kill() { m.cmd.Process.Kill() }

// end kills the machine and returns an error with the end of its console.
func (m *machine) end() error {
	m.kill()
	<-m.ended
	text := make([]byte, 4000)
	if info, err := m.console.Stat(); err == nil {
		n, _ := m.console.ReadAt(text, max(0, info.Size()-int64(len(text))))
		text = text[:n]
	}
	m.console.Close()
	return fmt.Errorf("the machine ended without the test's status (%v); its console:\n%s", m.state, text)
}
