//go:build linux

package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/go-proxier/proxier/internal/netlab"
)

// drops holds counters of packets that the kernel dropped for another reason than a rule, by host
// and counter. They tell whether a lost packet met a full queue or a race in connection tracking.
type drops map[string]uint64

// queueDrops are the counters of TcpExt in /proc/net/netstat that count dropped packets of new
// connections (linux/snmp.h).
var queueDrops = []string{"ListenOverflows", "ListenDrops", "TCPBacklogDrop", "TCPReqQFullDrop"}

// trackingDrops are the columns of /proc/net/stat/nf_conntrack that count dropped packets, and
// clashres, which counts resolved clashes (net/netfilter/nf_conntrack_standalone.c).
var trackingDrops = []string{"insert_failed", "drop", "early_drop", "clashres"}

// drops reads the counters of all hosts. Counters that the kernel lacks are left out.
func (n *network) drops() drops {
	d := drops{}
	for _, h := range append([]*netlab.Host{n.node, n.client, n.far}, n.pods...) {
		h.Do(func() error {
			queues, _ := os.ReadFile("/proc/thread-self/net/netstat")
			tracking, _ := os.ReadFile("/proc/thread-self/net/stat/nf_conntrack")
			d.add(h.Name, string(queues), string(tracking))
			return nil
		})
	}
	// Each processor has a line. The second column counts packets that did not fit into its
	// queue (net/core/net-procfs.c), in all namespaces.
	text, _ := os.ReadFile("/proc/net/softnet_stat")
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 {
			n, _ := strconv.ParseUint(f[1], 16, 64)
			d["machine backlog"] += n
		}
	}
	return d
}

// add adds the counters of a host from the text of the two files.
func (d drops) add(host, queues, tracking string) {
	var names []string
	for line := range strings.Lines(queues) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0 || f[0] != "TcpExt:":
		case names == nil:
			names = f
		default:
			for i := range min(len(names), len(f)) {
				if slices.Contains(queueDrops, names[i]) {
					d[host+" "+names[i]], _ = strconv.ParseUint(f[i], 10, 64)
				}
			}
		}
	}
	names = nil
	for line := range strings.Lines(tracking) {
		f := strings.Fields(line)
		if names == nil {
			names = f
			continue
		}
		for i := range min(len(names), len(f)) {
			if slices.Contains(trackingDrops, names[i]) {
				n, _ := strconv.ParseUint(f[i], 16, 64)
				d[host+" "+names[i]] += n
			}
		}
	}
}

// since describes the counters that grew since an earlier reading.
func (d drops) since(before drops) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(d)) {
		if n := d[name] - before[name]; n > 0 {
			out = append(out, fmt.Sprintf("%s %d", name, n))
		}
	}
	if out == nil {
		return "nothing"
	}
	return strings.Join(out, ", ")
}
