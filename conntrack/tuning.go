package conntrack

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// MaxEntries is the largest limit that [Tuning.MaxPerCore] can lead to: more
// entries would cost hundreds of megabytes of kernel memory on machines with many
// CPUs. [Tuning.Min] may ask for more. It is kube-proxy's bound.
const MaxEntries = 1 << 20

// Tuning says how the kernel's connection tracking is to be set up. The zero value
// leaves everything as it is. Defaults are the caller's choice; kube-proxy's are
// given with each field.
type Tuning struct {
	// MaxPerCore is how many connections may be tracked for each CPU, up to
	// [MaxEntries] for the whole machine (net.netfilter.nf_conntrack_max). 0 leaves
	// the limit and the size of the hash table as they are. kube-proxy's default is
	// 32,768.
	MaxPerCore int
	// Min is the least limit, whatever MaxPerCore comes to. [MaxEntries] does not
	// bound it. It has no effect if MaxPerCore is 0. kube-proxy's default is 131,072.
	Min int
	// TCPEstablishedTimeout is how long an established TCP connection is remembered
	// without a packet (nf_conntrack_tcp_timeout_established); 0 leaves it.
	// kube-proxy's default is 24 hours, the kernel's 5 days.
	TCPEstablishedTimeout time.Duration
	// TCPCloseWaitTimeout is the same for one that the other side has closed
	// (nf_conntrack_tcp_timeout_close_wait); 0 leaves it. kube-proxy's default is 1
	// hour, the kernel's 1 minute.
	TCPCloseWaitTimeout time.Duration
	// UDPTimeout is how long a UDP flow without replies is remembered
	// (nf_conntrack_udp_timeout), UDPStreamTimeout one with packets both ways
	// (nf_conntrack_udp_timeout_stream); 0 leaves them, kube-proxy's default.
	UDPTimeout, UDPStreamTimeout time.Duration
	// TCPBeLiberal has packets outside of a TCP window not counted as invalid
	// (nf_conntrack_tcp_be_liberal); false leaves it.
	TCPBeLiberal bool
}

// Setting is a kernel parameter and what it should be.
type Setting struct {
	// Path is the parameter's file, below the root folder.
	Path string
	// Value is in the parameter's own unit; timeouts are seconds.
	Value int
	// AtLeast means that more than Value is fine.
	AtLeast bool
}

// The parameters' files, see the kernel's
// Documentation/networking/nf_conntrack-sysctl.rst; the size of the hash table is
// the module's.
const (
	sysctlFolder = "proc/sys/net/netfilter/nf_conntrack_"
	hashSizeFile = "sys/module/nf_conntrack/parameters/hashsize"
)

// Settings returns the parameters that t asks for on a machine with that many
// CPUs, in the order in which they should be set. The limit is the machine's, so
// cores is the number of its online CPUs (/sys/devices/system/cpu/online), not of
// those that the process may run on ([runtime.NumCPU]). Settings is a pure function;
// the error names a field that makes no sense.
func (t Tuning) Settings(cores int) ([]Setting, error) {
	if t.MaxPerCore < 0 || t.Min < 0 {
		return nil, fmt.Errorf("conntrack: MaxPerCore (%d) and Min (%d) must not be negative", t.MaxPerCore, t.Min)
	}
	var out []Setting
	if t.MaxPerCore > 0 {
		limit := MaxEntries
		// The product is only computed where it cannot overflow.
		if cores = max(cores, 1); t.MaxPerCore <= MaxEntries/cores {
			limit = t.MaxPerCore * cores
		}
		limit = max(limit, t.Min)
		out = append(out,
			Setting{Path: sysctlFolder + "max", Value: limit},
			// Four entries a bucket is the kernel's own proportion for small machines.
			Setting{Path: hashSizeFile, Value: limit / 4, AtLeast: true})
	}
	for _, d := range []struct {
		field, name string
		timeout     time.Duration
	}{
		{"TCPEstablishedTimeout", "tcp_timeout_established", t.TCPEstablishedTimeout},
		{"TCPCloseWaitTimeout", "tcp_timeout_close_wait", t.TCPCloseWaitTimeout},
		{"UDPTimeout", "udp_timeout", t.UDPTimeout},
		{"UDPStreamTimeout", "udp_timeout_stream", t.UDPStreamTimeout},
	} {
		if d.timeout < 0 {
			return nil, fmt.Errorf("conntrack: %s (%v) must not be negative", d.field, d.timeout)
		}
		if d.timeout > 0 {
			// A part of a second counts as a whole one: 0 would forget at once.
			seconds := (d.timeout + time.Second - 1) / time.Second
			out = append(out, Setting{Path: sysctlFolder + d.name, Value: int(seconds)})
		}
	}
	if t.TCPBeLiberal {
		out = append(out, Setting{Path: sysctlFolder + "tcp_be_liberal", Value: 1})
	}
	return out, nil
}

// SettingError says why a parameter is not as it should be.
type SettingError struct {
	// Setting is what it should be.
	Setting Setting
	// Now is the parameter's value, if Known.
	Now   int
	Known bool
	// Err is what the system said. It is [fs.ErrNotExist] if connection tracking is
	// not there (yet).
	Err error
}

// Error names the parameter, what it is and what it should be.
func (e *SettingError) Error() string {
	what := "at least "
	if !e.Setting.AtLeast {
		what = ""
	}
	switch {
	case e.ReadOnly():
		return fmt.Sprintf("conntrack: /%s is %d and cannot be set to %s%d from here: %v; set it on the host, or ask for no change",
			e.Setting.Path, e.Now, what, e.Setting.Value, e.Err)
	case errors.Is(e.Err, fs.ErrNotExist):
		return fmt.Sprintf("conntrack: cannot set /%s to %s%d: there is no such parameter; is the kernel module nf_conntrack loaded?",
			e.Setting.Path, what, e.Setting.Value)
	}
	return fmt.Sprintf("conntrack: cannot set /%s to %s%d: %v", e.Setting.Path, what, e.Setting.Value, e.Err)
}

// Unwrap returns Err.
func (e *SettingError) Unwrap() error { return e.Err }

// ReadOnly reports whether the parameter is there but cannot be written from
// here: in a container whose /proc/sys is read-only, without the privilege, or in
// a network namespace that has no say in it.
func (e *SettingError) ReadOnly() bool {
	return e.Known && (errors.Is(e.Err, fs.ErrPermission) || errors.Is(e.Err, syscall.EROFS) || errors.Is(e.Err, syscall.EOPNOTSUPP))
}

// Tuned is a parameter that was set.
type Tuned struct {
	// Setting is what it is now, and Old the value it had.
	Setting Setting
	Old     int
}

// Tune sets the parameters that are not as they should be, below a root folder: ""
// is "/". Parameters that are right are not written, so that all goes well where
// they cannot be. It returns what it changed. What fails is no reason to leave out
// the rest; the error joins a [*SettingError] for each.
func Tune(root string, settings []Setting) ([]Tuned, error) {
	if root == "" {
		root = "/"
	}
	var done []Tuned
	var errs []error
	for _, s := range settings {
		old, changed, err := tune(filepath.Join(root, filepath.FromSlash(s.Path)), s)
		if err != nil {
			errs = append(errs, err)
		} else if changed {
			done = append(done, Tuned{s, old})
		}
	}
	return done, errors.Join(errs...)
}

func tune(file string, s Setting) (old int, changed bool, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false, &SettingError{Setting: s, Err: err}
	}
	old, err = strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, false, &SettingError{Setting: s, Err: err}
	}
	if old == s.Value || s.AtLeast && old > s.Value {
		return old, false, nil
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_TRUNC, 0)
	if err == nil {
		_, err = f.WriteString(strconv.Itoa(s.Value))
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return old, false, &SettingError{Setting: s, Now: old, Known: true, Err: err}
	}
	return old, true, nil
}
