// Package tuning sets the kernel's parameters of connection tracking, as kube-proxy does.
package tuning

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

// MaxEntries bounds the limit that [Conntrack.Settings] computes from MaxPerCore. More
// entries would cost hundreds of megabytes of kernel memory on machines with many
// CPUs. [Conntrack.Min] may be larger. It is kube-proxy's bound.
const MaxEntries = 1 << 20

// Conntrack holds parameters of the kernel's connection tracking. The zero value changes
// nothing. The caller chooses the defaults. The comment of each field gives kube-proxy's.
type Conntrack struct {
	// MaxPerCore is the number of connections to track for each CPU, up to
	// [MaxEntries] for the whole machine (net.netfilter.nf_conntrack_max). A limit that
	// is higher already stays, as with kube-proxy 1.37. 0 changes neither the limit nor
	// the size of the hash table. kube-proxy's default is 32,768.
	MaxPerCore int
	// Min is the smallest limit, even if MaxPerCore yields less. [MaxEntries] does not
	// bound it. It has no effect if MaxPerCore is 0. kube-proxy's default is 131,072.
	Min int
	// TCPEstablishedTimeout is how long the kernel keeps an established TCP connection
	// without a packet (nf_conntrack_tcp_timeout_established); 0 changes nothing.
	// kube-proxy's default is 24 hours, the kernel's 5 days.
	TCPEstablishedTimeout time.Duration
	// TCPCloseWaitTimeout is how long the kernel keeps a TCP connection that the other
	// side has closed (nf_conntrack_tcp_timeout_close_wait); 0 changes nothing.
	// kube-proxy's default is 1 hour, the kernel's 1 minute.
	TCPCloseWaitTimeout time.Duration
	// UDPTimeout is how long the kernel keeps a UDP flow without replies
	// (nf_conntrack_udp_timeout). UDPStreamTimeout is how long it keeps a flow with
	// packets in both directions (nf_conntrack_udp_timeout_stream). 0, kube-proxy's
	// default, changes nothing.
	UDPTimeout, UDPStreamTimeout time.Duration
	// TCPBeLiberal makes the kernel treat packets outside of a TCP window as valid
	// (nf_conntrack_tcp_be_liberal); false changes nothing.
	TCPBeLiberal bool
}

// Setting is a kernel parameter and its wanted value.
type Setting struct {
	// Path is the parameter's file, below the root folder.
	Path string
	// Value is in the parameter's own unit; timeouts are in seconds.
	Value int
	// AtLeast means that values above Value are fine.
	AtLeast bool
}

// The parameters' files, see the kernel's
// Documentation/networking/nf_conntrack-sysctl.rst; the size of the hash table is
// the module's.
const (
	sysctlFolder = "proc/sys/net/netfilter/nf_conntrack_"
	hashSizeFile = "sys/module/nf_conntrack/parameters/hashsize"
)

// Settings returns the parameters of t for a machine with the given number of CPUs, in
// the order in which to set them. The limit applies to the whole machine, so cores is the
// number of its online CPUs (/sys/devices/system/cpu/online), not the number that the
// process may run on ([runtime.NumCPU]). The error names an invalid field.
func (t Conntrack) Settings(cores int) ([]Setting, error) {
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
			// A smaller table would lose connections of a node that was tuned for more.
			Setting{Path: sysctlFolder + "max", Value: limit, AtLeast: true},
			// The kernel uses four entries for each bucket on small machines.
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
			// Round up, because with 0 the kernel would drop entries immediately.
			seconds := (d.timeout + time.Second - 1) / time.Second
			out = append(out, Setting{Path: sysctlFolder + d.name, Value: int(seconds)})
		}
	}
	if t.TCPBeLiberal {
		out = append(out, Setting{Path: sysctlFolder + "tcp_be_liberal", Value: 1})
	}
	return out, nil
}

// settingError is the error of a parameter that could not be set. If known is set, now is the
// parameter's value.
type settingError struct {
	setting Setting
	now     int
	known   bool
	err     error
}

func (e *settingError) Error() string {
	what := "at least "
	if !e.setting.AtLeast {
		what = ""
	}
	switch {
	case e.known && (errors.Is(e.err, fs.ErrPermission) || errors.Is(e.err, syscall.EROFS) || errors.Is(e.err, syscall.EOPNOTSUPP)):
		return fmt.Sprintf("conntrack: /%s is %d and cannot be set to %s%d from here: %v; set it on the host, or ask for no change",
			e.setting.Path, e.now, what, e.setting.Value, e.err)
	case errors.Is(e.err, fs.ErrNotExist):
		return fmt.Sprintf("conntrack: cannot set /%s to %s%d: the parameter does not exist; is the kernel module nf_conntrack loaded?",
			e.setting.Path, what, e.setting.Value)
	}
	return fmt.Sprintf("conntrack: cannot set /%s to %s%d: %v", e.setting.Path, what, e.setting.Value, e.err)
}

func (e *settingError) Unwrap() error { return e.err }

// Result is the outcome of [Apply] for one setting.
type Result struct {
	// Setting is the setting.
	Setting Setting
	// Old is the value that the parameter had, 0 if it could not be read.
	Old int
	// Changed reports whether Apply changed the parameter.
	Changed bool
	// Err is nil or names the parameter and wraps the system's error, [fs.ErrNotExist] if
	// connection tracking is not loaded.
	Err error
}

// Apply sets parameters below a root folder; "" means "/". It writes only parameters whose
// value differs, so it succeeds on a read-only file system if all values are right. It
// continues after an error, and returns one result for each setting, in their order.
func Apply(root string, settings []Setting) []Result {
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
		return 0, false, &settingError{setting: s, err: err}
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
		return old, false, &settingError{setting: s, now: old, known: true, err: err}
	}
	return old, true, nil
}
