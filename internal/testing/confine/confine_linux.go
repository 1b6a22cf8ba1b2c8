package confine

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// Limits are the limits of a process.
type Limits struct {
	// Capabilities lists the capabilities (CAP_* of include/uapi/linux/capability.h)
	// that the process and its children have. Nil means no capability.
	Capabilities []int
	// Files, Memory and FileSize are RLIMIT_NOFILE, RLIMIT_DATA (in bytes, without
	// address space that Go only reserves) and RLIMIT_FSIZE (in bytes). Nil changes
	// nothing.
	Files, Memory, FileSize *uint64
}

// Roles holds the functions that a confined process can run, by name. If a function
// returns an error, the process writes it to standard error and exits with status 1.
type Roles map[string]func() error

const (
	roleEnv   = "PROXIER_CONFINED_ROLE"
	limitsEnv = "PROXIER_CONFINED_LIMITS"
)

// Command returns the command that runs this program in a role, by [Roles.Enter]. The
// caller may add to the environment.
func Command(role string, l Limits) *exec.Cmd {
	text, err := json.Marshal(l)
	if err != nil {
		panic(err) // Limits has only numbers, which can be encoded
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+role, limitsEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	return cmd
}

// Enter runs the role of a process that a [Command] started, and exits. In any other
// process it does nothing. Call it in the first line of a TestMain.
func (r Roles) Enter() {
	name, ok := os.LookupEnv(roleEnv)
	if !ok {
		return
	}
	if err := r.enter(name); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func (r Roles) enter(name string) error {
	if text, first := os.LookupEnv(limitsEnv); first {
		return confine(text)
	}
	role := r[name]
	if role == nil {
		return fmt.Errorf("confine: no role %q", name)
	}
	return role()
}

// confine drops the calling thread's privileges and executes this program again, which
// gives them to the whole process.
func confine(text string) error {
	var l Limits
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return fmt.Errorf("confine: %w", err)
	}
	runtime.LockOSThread()
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if slices.Contains(l.Capabilities, c) {
			continue
		}
		// EINVAL: an older kernel does not have the capability.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("confine: drop capability %d: %w", c, err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("confine: ambient capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("confine: no_new_privs: %w", err)
	}
	for _, r := range []struct {
		resource int
		value    *uint64
	}{{unix.RLIMIT_NOFILE, l.Files}, {unix.RLIMIT_DATA, l.Memory}, {unix.RLIMIT_FSIZE, l.FileSize}} {
		if r.value == nil {
			continue
		}
		// Package syscall, not unix: otherwise os/exec restores the old limit of files.
		if err := syscall.Setrlimit(r.resource, &syscall.Rlimit{Cur: *r.value, Max: *r.value}); err != nil {
			return fmt.Errorf("confine: resource %d: %w", r.resource, err)
		}
	}
	if err := os.Unsetenv(limitsEnv); err != nil {
		return err
	}
	return fmt.Errorf("confine: %w", syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
}

// Effective returns the capabilities that the calling thread has in effect.
func Effective() ([]int, error) {
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return nil, fmt.Errorf("confine: capget: %w", err)
	}
	var out []int
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if data[c/32].Effective&(1<<(c%32)) != 0 {
			out = append(out, c)
		}
	}
	return out, nil
}
