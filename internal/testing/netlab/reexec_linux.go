package netlab

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
)

// InsideEnv marks a process that [Reexec] started in new namespaces. Its children inherit
// the variable, so that a fuzz worker does not enter other namespaces.
const InsideEnv = "PROXIER_NETLAB_INSIDE"

// Reexec runs this program again in new user and network namespaces, as root
// there, with the loopback interface up.
//
// In the process that is already inside, Reexec returns immediately, with inside true. In any
// other process it starts the same program with the same arguments and streams, passes on
// signals, and returns the child's exit code when the child has ended. The code of a child
// that signal n killed is 128+n. The child does not outlive this process. An error means
// that the namespaces could not be created or set up; inside is valid then, too.
func Reexec() (inside bool, code int, err error) {
	if os.Getenv(InsideEnv) != "" {
		return true, 0, loopbackUp()
	}
	// Keep the thread, because the kernel sends Pdeathsig when the thread that forked ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd, err := start(syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET)
	if err != nil && os.Geteuid() == 0 {
		// Root needs no user namespace, and some systems forbid them.
		cmd, err = start(syscall.CLONE_NEWNET)
	}
	if err != nil {
		return false, 0, fmt.Errorf("netlab: start in new namespaces: %w", err)
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	go func() {
		for s := range signals {
			// Fails only if the child has just ended.
			_ = cmd.Process.Signal(s)
		}
	}()
	err = cmd.Wait()
	signal.Stop(signals)
	close(signals)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return false, 0, fmt.Errorf("netlab: wait: %w", err)
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return false, 128 + int(status.Signal()), nil
	}
	return false, cmd.ProcessState.ExitCode(), nil
}

// start runs this program in new namespaces of the given kinds.
func start(kinds uintptr) (*exec.Cmd, error) {
	// The link, unlike its target, always is the running program.
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = os.Args
	cmd.Env = append(os.Environ(), InsideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: kinds, Pdeathsig: syscall.SIGKILL}
	if kinds&syscall.CLONE_NEWUSER != 0 {
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
	}
	return cmd, cmd.Start()
}

// loopbackUp brings up the loopback interface of the calling thread's namespace.
func loopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("netlab: loopback: %w", err)
	}
	return nil
}
