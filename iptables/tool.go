//go:build linux

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/tracker"
)

var (
	// ErrUnsupported is what errors are about a program that is missing or too old,
	// or a kernel that cannot do what is needed.
	ErrUnsupported = errors.New("iptables: not supported here")
	// ErrLocked is what errors are about the xtables lock, held by somebody else for
	// longer than [Config.LockWait]. Nothing was changed.
	ErrLocked = errors.New("iptables: another program holds the xtables lock")
)

// CommandError is a program's refusal. Nothing of what it was given is in effect.
type CommandError struct {
	// Program is the program's path, Status its exit status, -1 if a signal ended
	// it. Message is what it wrote to its standard error, cut after a few kB.
	Program string
	Status  int
	Message string
	// Line is the line of its input that it complained about, counted from 1, and
	// Text what stands there; 0 and "" if it told none.
	Line int
	Text string

	cause error
	// whole: what it was given cannot be divided.
	whole bool
}

// Error names all of it.
func (e *CommandError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: ", e.Program)
	if e.cause != nil {
		fmt.Fprintf(&b, "%v: ", e.cause)
	}
	fmt.Fprintf(&b, "exit status %d: %s", e.Status, strings.Join(strings.Fields(e.Message), " "))
	if e.Text != "" {
		fmt.Fprintf(&b, " (line %d: %s)", e.Line, e.Text)
	}
	return b.String()
}

// Unwrap returns [ErrLocked], the error of the context, or nil.
func (e *CommandError) Unwrap() error { return e.cause }

// unclear reports whether the program may have done what it was asked to: it was
// ended by a signal.
func (e *CommandError) unclear() bool { return e.Status < 0 }

// tool runs the programs of one family, in one network namespace.
type tool struct {
	restore, save string
	restoreArgs   []string
	env           []string
	timeout       time.Duration
	// netns is a file descriptor of the namespace, or -1 for that of the calling
	// thread.
	netns int
	nft   bool
}

// newTool finds the programs and asks them for their version.
func newTool(ctx context.Context, c Config, f tracker.Family, netns int) (*tool, error) {
	tools := c.tools(f)
	t := &tool{timeout: c.Timeout, netns: netns, env: os.Environ()}
	if c.LockFile != "" {
		t.env = append(t.env, "XTABLES_LOCKFILE="+c.LockFile)
	}
	for _, p := range []struct {
		path *string
		name string
	}{{&t.restore, tools.Restore}, {&t.save, tools.Save}} {
		path, err := exec.LookPath(p.name)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnsupported, err)
		}
		*p.path = path
	}
	out, err := t.run(ctx, t.restore, []string{"--version"}, nil)
	if err != nil {
		return nil, err
	}
	major, minor, patch, nft, ok := parseVersion(out)
	if !ok {
		return nil, fmt.Errorf("%w: %s tells no version: %q", ErrUnsupported, t.restore, out)
	}
	if major<<16|minor<<8|patch < 1<<16|6<<8|2 {
		return nil, fmt.Errorf("%w: %s is version %d.%d.%d, 1.6.2 is needed", ErrUnsupported, t.restore, major, minor, patch)
	}
	t.nft = nft
	t.restoreArgs = []string{"--noflush"}
	if !nft {
		t.restoreArgs = append(t.restoreArgs, "--wait", strconv.Itoa(max(1, int(c.LockWait/time.Second))))
	}
	return t, nil
}

var versionPattern = regexp.MustCompile(`v(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?: \((\w+)\))?`)

// parseVersion reads "iptables-restore v1.8.9 (nf_tables)". Before 1.8 there was
// but one flavour, and no word for it.
func parseVersion(out []byte) (major, minor, patch int, nft, ok bool) {
	m := versionPattern.FindSubmatch(out)
	if m == nil {
		return 0, 0, 0, false, false
	}
	n := func(b []byte) int { i, _ := strconv.Atoi(string(b)); return i }
	return n(m[1]), n(m[2]), n(m[3]), string(m[4]) == "nf_tables", true
}

// within calls f on a thread inside the namespace, which no other goroutine has
// meanwhile.
func (t *tool) within(f func() error) error {
	if t.netns < 0 {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		return f()
	}
	done := make(chan error, 1)
	go func() {
		// The thread is not unlocked unless it is back where it was, so that it ends
		// with this goroutine.
		runtime.LockOSThread()
		home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- fmt.Errorf("iptables: network namespace: %w", err)
			return
		}
		defer unix.Close(home)
		if err := unix.Setns(t.netns, unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("iptables: enter network namespace: %w", err)
			return
		}
		err = f()
		if unix.Setns(home, unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// maxMessage is how much of a program's complaints is kept.
const maxMessage = 4096

// run runs a program to its end and returns its output.
func (t *tool) run(ctx context.Context, path string, args []string, in *input) ([]byte, error) {
	var out bytes.Buffer
	err := t.stream(ctx, path, args, in, &out)
	return out.Bytes(), err
}

// stream runs a program to its end, its output going to out.
func (t *tool) stream(ctx context.Context, path string, args []string, in *input, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	var message limited
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr = t.env, out, &message
	// What a program has written is still being read when it has ended, for longer on
	// a busy machine. Only what it leaves running could keep that from ending.
	cmd.WaitDelay = 30 * time.Second
	// A program that waits for the lock must not write what a killed agent wanted
	// when the next agent has already read the tables. The signal comes when the
	// thread that started it ends: within keeps that one until it is done.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if in != nil {
		cmd.Stdin = bytes.NewReader(in.text.Bytes())
	}
	err := t.within(cmd.Run)
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &exit) && ctx.Err() == nil:
		return fmt.Errorf("iptables: run %s: %w", path, err)
	}
	e := &CommandError{Program: path, Status: -1, Message: message.String(), cause: ctx.Err()}
	if exit != nil {
		e.Status = exit.ExitCode()
	}
	if strings.Contains(e.Message, "xtables lock") {
		e.cause = errors.Join(e.cause, ErrLocked)
	}
	if in != nil {
		e.whole = in.chains <= 1
		if e.Line = complaint(e.Message); e.Line != 0 {
			e.Text = in.line(e.Line)
		}
	}
	return e
}

// limited keeps the beginning of what is written to it.
type limited struct{ bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	l.Buffer.Write(p[:min(len(p), maxMessage-l.Len())])
	return len(p), nil
}

var linePattern = regexp.MustCompile(`\bline:? (\d{1,9})\b`)

// complaint returns the line that a message is about, 0 if it tells none.
func complaint(message string) int {
	m := linePattern.FindStringSubmatch(message)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

// apply has an input applied.
func (t *tool) apply(ctx context.Context, in *input) error {
	_, err := t.run(ctx, t.restore, t.restoreArgs, in)
	return err
}

// tooLarge reports whether a program could not hand the kernel so much at once.
func tooLarge(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && (strings.Contains(e.Message, "Message too long") || strings.Contains(e.Message, "No buffer space"))
}

// refused reports whether an error is a refusal of what the input says, rather
// than a failure to have it looked at; nothing of it is in effect.
func refused(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && !e.unclear() && e.cause == nil && !tooLarge(err)
}
