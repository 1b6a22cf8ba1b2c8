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

// Limits is what a process may do and have.
type Limits struct {
	// Capabilities is the only ones (CAP_* of include/uapi/linux/capability.h) that
	// the process, and what it starts, can have. Nil is none at all.
	Capabilities []int
	// Files, Memory and FileSize are RLIMIT_NOFILE, RLIMIT_DATA (bytes; address
	// space that is only reserved, as Go does, is not counted) and RLIMIT_FSIZE
	// (bytes); nil leaves them as they are.
	Files, Memory, FileSize *uint64
}

// Roles is what a confined process can be told to do, by name. The function's
// error goes to standard error and makes the exit status 1.
type Roles map[string]func() error

const (
	roleEnv   = "PROXIER_CONFINED_ROLE"
	limitsEnv = "PROXIER_CONFINED_LIMITS"
)

// Command returns the command that runs this program in a role, by
// [Roles.Enter]. The caller adds what else it needs to the environment.
func Command(role string, l Limits) *exec.Cmd {
	text, err := json.Marshal(l)
	if err != nil {
		panic(err) // it has numbers only
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+role, limitsEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	return cmd
}

// Enter does nothing in a process that was not started by a [Command]. In one
// that was it takes the role, and does not return. It is for the first line of a
// TestMain.
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

// confine gives rights up and becomes this program once more: what a thread has
// is then what the process has.
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
		// EINVAL: an older kernel does not know it.
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
		// By syscall, which has os/exec not put the old limit of files back.
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
