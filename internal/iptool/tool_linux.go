package iptool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/tracker"
)

// minimum is the oldest supported version, 1.6.2. It is the first that can masquerade to
// random ports (--random-fully).
const minimum = 1<<16 | 6<<8 | 2

// Config selects the tools and how to run them.
type Config struct {
	// Family selects iptables or ip6tables.
	Family tracker.Family
	// Flavor is "nft", "legacy", or "" for the tools without either in their names.
	Flavor string
	// Restore and Save name the tools, or are "" for the names that follow from Family
	// and Flavor. Names without a slash are looked up on PATH.
	Restore, Save string
	// Namespace is the network namespace of the tools.
	Namespace *netns.Namespace
	// LockFile replaces the xtables lock file of the legacy tools, unless it is "".
	LockFile string
	// LockWait bounds the wait for that lock, in whole seconds.
	LockWait time.Duration
	// Timeout bounds a tool's run; 0 means no bound.
	Timeout time.Duration
}

func (c Config) name(suffix string) string {
	name := "iptables"
	if c.Family == tracker.IPv6 {
		name = "ip6tables"
	}
	if c.Flavor != "" {
		name += "-" + c.Flavor
	}
	return name + "-" + suffix
}

// Tool runs the tools of one family. Its methods may be called concurrently.
type Tool struct {
	config      Config
	env         []string
	nft         bool
	restoreArgs []string
}

// Find looks up the tools and checks their version.
func Find(ctx context.Context, c Config) (*Tool, error) {
	t := &Tool{config: c, env: os.Environ()}
	if c.LockFile != "" {
		t.env = append(t.env, "XTABLES_LOCKFILE="+c.LockFile)
	}
	for path, suffix := range map[*string]string{&t.config.Restore: "restore", &t.config.Save: "save"} {
		if *path == "" {
			*path = c.name(suffix)
		}
		found, err := exec.LookPath(*path)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnsupported, err)
		}
		*path = found
	}
	var out bytes.Buffer
	if err := t.run(ctx, t.config.Restore, []string{"--version"}, nil, &out); err != nil {
		return nil, err
	}
	version, nft, ok := parseVersion(out.Bytes())
	if !ok {
		return nil, fmt.Errorf("%w: %s prints no version: %q", ErrUnsupported, t.config.Restore, out.Bytes())
	}
	if version < minimum {
		return nil, fmt.Errorf("%w: %s has version %d.%d.%d, want 1.6.2 or later",
			ErrUnsupported, t.config.Restore, version>>16, version>>8&0xff, version&0xff)
	}
	t.nft = nft
	t.restoreArgs = []string{"--noflush"}
	if !nft { // the nft tools have no lock
		t.restoreArgs = append(t.restoreArgs, "--wait", strconv.Itoa(max(1, int(c.LockWait/time.Second))))
	}
	return t, nil
}

var versionPattern = regexp.MustCompile(`v(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?(?: \((\w+)\))?`)

// parseVersion parses a version as in "iptables-restore v1.8.9 (nf_tables)". The result has
// a byte for each part. Versions before 1.8 name no implementation, because they had only
// one.
func parseVersion(out []byte) (version int, nft, ok bool) {
	m := versionPattern.FindSubmatch(out)
	if m == nil {
		return 0, false, false
	}
	for _, part := range m[1:4] {
		n, _ := strconv.Atoi(string(part))
		version = version<<8 | min(n, 255)
	}
	return version, string(m[4]) == "nf_tables", true
}

// WithTimeout returns a Tool that differs in Config.Timeout.
func (t *Tool) WithTimeout(d time.Duration) *Tool {
	out := *t
	out.config.Timeout = d
	return &out
}

// NFT reports whether the tools program nf_tables, rather than ip_tables.
func (t *Tool) NFT() bool { return t.nft }

// Do calls f inside the tools' namespace, as [netns.Namespace.Do] does.
func (t *Tool) Do(f func() error) error { return t.config.Namespace.Do(f) }

// Save writes the output of iptables-save with the options to out. If table is not "", it
// prints that table only. After an error, what it wrote lacks tables or rules.
func (t *Tool) Save(ctx context.Context, table string, out io.Writer, options ...string) error {
	args := options
	if table != "" {
		args = append([]string{"-t", table}, options...)
	}
	w := &checked{to: out}
	err := t.run(ctx, t.config.Save, args, nil, w)
	var e *Error
	switch {
	case w.unreadable, errors.As(err, &e) && strings.Contains(e.Message, "Parsing nftables rule failed"):
		return &Error{Program: t.config.Save, Message: "incompatible table", Cause: ErrUnreadable}
	case err == nil && (w.within || len(w.line) != 0):
		return &Error{Program: t.config.Save, Cause: errIncomplete}
	}
	return err
}

// checked is a writer of the output of iptables-save that notices what the output lacks. The
// program's exit status is 0 after it left out a table.
type checked struct {
	to         io.Writer
	line       []byte // the beginning of a line without its end
	within     bool   // in a table
	unreadable bool   // a table is left out
}

func (c *checked) Write(p []byte) (int, error) {
	for rest := p; ; {
		part, after, ended := bytes.Cut(rest, []byte("\n"))
		c.line = append(c.line, part[:min(len(part), maxMessage-len(c.line))]...)
		switch {
		case !ended:
			return c.to.Write(p)
		case bytes.HasPrefix(c.line, []byte("*")):
			c.within = true
		case string(c.line) == "COMMIT":
			c.within = false
		case bytes.HasPrefix(c.line, []byte("#")):
			c.unreadable = c.unreadable || bytes.HasSuffix(c.line, []byte("is incompatible, use 'nft' tool."))
		}
		c.line, rest = c.line[:0], after
	}
}

// Restore applies an input of iptables-restore. It does not flush chains that the input does
// not name. The tool applies each of the input's tables as a whole or not at all.
func (t *Tool) Restore(ctx context.Context, input []byte, options ...string) error {
	return t.run(ctx, t.config.Restore, append(t.restoreArgs[:len(t.restoreArgs):len(t.restoreArgs)], options...), input, io.Discard)
}

// maxMessage is the number of bytes to keep of a tool's error messages.
const maxMessage = 4096

func (t *Tool) run(ctx context.Context, path string, args []string, input []byte, out io.Writer) error {
	if t.config.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, t.config.Timeout)
		defer cancel()
	}
	var message limited
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = t.env, bytes.NewReader(input), out, &message
	// The output may be read long after the program's end on a busy machine. Only a process
	// that the program left could keep the pipe open for longer.
	cmd.WaitDelay = 30 * time.Second
	// If the agent is killed, a program that waits for the lock must not write after the next agent has read the
	// tables. The kernel sends the signal when the thread that started the program ends, which Do keeps until then.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err := t.Do(cmd.Run)
	var exit *exec.ExitError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &exit) && ctx.Err() == nil:
		return fmt.Errorf("run %s: %w", path, err)
	}
	e := &Error{Program: path, Status: -1, Message: message.kept.String(), Cause: ctx.Err()}
	if exit != nil {
		e.Status = exit.ExitCode()
	}
	if strings.Contains(e.Message, "xtables lock") {
		e.Cause = errors.Join(e.Cause, ErrLocked)
	}
	if e.Line = failedLine(e.Message); e.Line != 0 {
		e.Text = line(input, e.Line)
	}
	return e
}

// limited is a writer that keeps the first maxMessage bytes. It does not embed its buffer,
// because the buffer's ReadFrom would keep everything.
type limited struct{ kept bytes.Buffer }

func (l *limited) Write(p []byte) (int, error) {
	l.kept.Write(p[:min(len(p), maxMessage-l.kept.Len())])
	return len(p), nil
}

var linePattern = regexp.MustCompile(`\bline:? (\d{1,9})\b`)

func failedLine(message string) int {
	m := linePattern.FindStringSubmatch(message)
	if m == nil {
		return 0
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

// line returns line n of text, counted from 1, or "" if text has fewer lines.
func line(text []byte, n int) string {
	for l := range bytes.Lines(text) {
		if n--; n == 0 {
			return string(bytes.TrimRight(l, "\n"))
		}
	}
	return ""
}
