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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// MaxEntries bounds the limit that [Settings] computes from maxPerCore, as kube-proxy does. More entries would cost
// hundreds of megabytes of kernel memory on machines with many CPUs. The field min may be larger.
const MaxEntries = 1 << 20

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

// Settings returns the parameters of a configuration with its defaults, whose numbers are not negative, for a machine
// with the given number of CPUs, in the order in which to set them. The limit applies to the whole machine, so cores
// is the number of its online CPUs (/sys/devices/system/cpu/online), not the number that the process may run on
// ([runtime.NumCPU]).
func Settings(c v1alpha1.KubeProxyConntrackConfiguration, cores int) (out []Setting) {
	if *c.MaxPerCore > 0 {
		limit := int(max(min(int64(*c.MaxPerCore)*int64(max(cores, 1)), MaxEntries), int64(*c.Min)))
		out = append(out,
			// A smaller table would lose connections of a node that was tuned for more.
			Setting{sysctlFolder + "max", limit, true, "--conntrack-max-per-core=0"},
			// The kernel uses four entries for each bucket on small machines.
			Setting{hashSizeFile, limit / 4, true, "--conntrack-max-per-core=0"})
	}
	timeout := func(name, flag string, d metav1.Duration) {
		if d.Duration > 0 {
			// Round up, because with 0 the kernel would drop entries immediately.
			out = append(out, Setting{Path: sysctlFolder + name, Value: int((d.Duration + time.Second - 1) / time.Second), Skip: flag + "=0"})
		}
	}
	timeout("tcp_timeout_established", "--conntrack-tcp-timeout-established", *c.TCPEstablishedTimeout)
	timeout("tcp_timeout_close_wait", "--conntrack-tcp-timeout-close-wait", *c.TCPCloseWaitTimeout)
	timeout("udp_timeout", "--conntrack-udp-timeout", c.UDPTimeout)
	timeout("udp_timeout_stream", "--conntrack-udp-timeout-stream", c.UDPStreamTimeout)
	if c.TCPBeLiberal {
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
