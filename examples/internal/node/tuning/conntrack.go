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
	// Skip is the flag that leaves the parameter unchanged.
	Skip string
}

// The parameters' files, see the kernel's
// Documentation/networking/nf_conntrack-sysctl.rst; the size of the hash table is
// the module's.
const (
	sysctlFolder = "proc/sys/net/netfilter/nf_conntrack_"
	hashSizeFile = "sys/module/nf_conntrack/parameters/hashsize"
)

// Settings returns the parameters of t, whose fields are not negative, for a machine with the given
// number of CPUs, in the order in which to set them. The limit applies to the whole machine, so cores is
// the number of its online CPUs (/sys/devices/system/cpu/online), not the number that the
// process may run on ([runtime.NumCPU]).
func (t Conntrack) Settings(cores int) (out []Setting) {
	if t.MaxPerCore > 0 {
		limit := MaxEntries
		// The product is only computed where it cannot overflow.
		if cores = max(cores, 1); t.MaxPerCore <= MaxEntries/cores {
			limit = t.MaxPerCore * cores
		}
		limit = max(limit, t.Min)
		out = append(out,
			// A smaller table would lose connections of a node that was tuned for more.
			Setting{sysctlFolder + "max", limit, true, "--conntrack-max-per-core=0"},
			// The kernel uses four entries for each bucket on small machines.
			Setting{hashSizeFile, limit / 4, true, "--conntrack-max-per-core=0"})
	}
	timeout := func(name, flag string, d time.Duration) {
		if d > 0 {
			// Round up, because with 0 the kernel would drop entries immediately.
			out = append(out, Setting{Path: sysctlFolder + name, Value: int((d + time.Second - 1) / time.Second), Skip: flag + "=0"})
		}
	}
	timeout("tcp_timeout_established", "--conntrack-tcp-timeout-established", t.TCPEstablishedTimeout)
	timeout("tcp_timeout_close_wait", "--conntrack-tcp-timeout-close-wait", t.TCPCloseWaitTimeout)
	timeout("udp_timeout", "--conntrack-udp-timeout", t.UDPTimeout)
	timeout("udp_timeout_stream", "--conntrack-udp-timeout-stream", t.UDPStreamTimeout)
	if t.TCPBeLiberal {
		out = append(out, Setting{Path: sysctlFolder + "tcp_be_liberal", Value: 1, Skip: "--conntrack-tcp-be-liberal=false"})
	}
	return out
}

// Apply sets the parameter below a root folder; "" means "/". It writes only a value that differs, so it
// succeeds on a read-only file system if the value is right. old is the value that the parameter had, or
// -1. The error wraps the system's.
func (s Setting) Apply(root string) (old int, changed bool, err error) {
	file := filepath.Join("/", root, filepath.FromSlash(s.Path))
	text, err := os.ReadFile(file)
	if err == nil {
		old, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if err != nil {
		return -1, false, s.failed(-1, err)
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
		return old, false, s.failed(old, err)
	}
	return old, true, nil
}

// failed returns the error of Apply. now is the parameter's value, or -1.
func (s Setting) failed(now int, err error) error {
	least := ""
	if s.AtLeast {
		least = "at least "
	}
	switch {
	case now >= 0 && (errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.EOPNOTSUPP)):
		return fmt.Errorf("conntrack: /%s is %d and cannot be set to %s%d from here: %w; set it on the host, or ask for no change", s.Path, now, least, s.Value, err)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("conntrack: cannot set /%s to %s%d: %w; is the kernel module nf_conntrack loaded?", s.Path, least, s.Value, err)
	}
	return fmt.Errorf("conntrack: cannot set /%s to %s%d: %w", s.Path, least, s.Value, err)
}
