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

// SettingError reports why a parameter does not have the value that it should have.
type SettingError struct {
	// Setting is the parameter and the value.
	Setting Setting
	// Now is the parameter's value, if Known.
	Now   int
	Known bool
	// Err is the system's error. It wraps [fs.ErrNotExist] if connection tracking is not
	// loaded.
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

// ReadOnly reports whether the parameter exists but this process cannot write it: in a
// container whose /proc/sys is read-only, without the privilege, or in a network
// namespace that does not own the parameter.
func (e *SettingError) ReadOnly() bool {
	return e.Known && (errors.Is(e.Err, fs.ErrPermission) || errors.Is(e.Err, syscall.EROFS) || errors.Is(e.Err, syscall.EOPNOTSUPP))
}

// Result is the outcome of [Tune] for one setting.
type Result struct {
	// Setting is the setting.
	Setting Setting
	// Old is the value that the parameter had, 0 if it could not be read.
	Old int
	// Changed reports whether Tune changed the parameter.
	Changed bool
	// Err is nil or a [*SettingError].
	Err error
}

// Tune sets parameters below a root folder; "" is "/". It writes only those whose value
// differs, so it succeeds on a read-only file system if all values are right. It goes on
// after an error, and returns one result for each setting, in their order.
func Tune(root string, settings []Setting) []Result {
	if root == "" {
		root = "/"
	}
	out := make([]Result, len(settings))
	for i, s := range settings {
		old, changed, err := tune(filepath.Join(root, filepath.FromSlash(s.Path)), s)
		out[i] = Result{Setting: s, Old: old, Changed: changed, Err: err}
	}
	return out
}

// tune sets the parameter in a file.
func tune(file string, s Setting) (old int, changed bool, err error) {
	text, err := os.ReadFile(file)
	if err == nil {
		old, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
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
