//go:build linux

package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// kernelState is the state of the node's kernel as programs list it: the lines of each object,
// such as "nft: ip proxier map services" or "ipset: KUBE-CLUSTER-IP".
type kernelState map[string][]string

// lists returns the commands that list the kernel's state in a mode. dump leaves out programs
// that are not installed.
func lists(mode string) [][]string {
	out := [][]string{
		{"iptables-legacy-save"},
		{"ip6tables-legacy-save"},
		{"ipset", "save"},
		{"ipvsadm", "-Sn"},
		{"ip", "-o", "addr", "show", "kube-ipvs0"},
	}
	if mode == "iptables" {
		// nft takes many minutes to list the rules of 10,000 Services.
		return append(out, []string{"iptables-nft-save"}, []string{"ip6tables-nft-save"})
	}
	return append(out, []string{"nft", "-s", "list", "ruleset"})
}

var (
	// volatile matches text that differs in each listing: counters, times, the programs'
	// comments, and the number of an interface, which may be created again.
	volatile = regexp.MustCompile(`(?m)^# .*\n|\[\d+:\d+\]| packets \d+ bytes \d+| expires \S+|^\d+: `)
	// canary matches the canaries of mode iptables, which have a new comment each time.
	canary = regexp.MustCompile(`KUBE-\w+-CANARY`)
	// nothing matches the programs' errors if the kernel has no such objects.
	nothing = regexp.MustCompile(`does not exist|Protocol not available|Can't initialize ipvs`)
	// builtIn matches the lines of iptables-save that do not depend on any rule.
	builtIn = regexp.MustCompile(`^(\*.*|COMMIT|:[A-Z]+ ACCEPT ?)$`)
)

// dump lists the kernel's state.
func (s *soak) dump(ctx context.Context) (kernelState, error) {
	out := kernelState{}
	for _, args := range lists(s.o.mode) {
		if _, err := exec.LookPath(args[0]); err != nil {
			continue
		}
		text, err := s.net.node.Output(args[0], args[1:]...)
		if err != nil {
			if !nothing.MatchString(err.Error()) {
				return nil, err
			}
			text = ""
		}
		text = volatile.ReplaceAllString(text, "")
		if args[0] == "nft" {
			out.addNFT(text)
			continue
		}
		for line := range strings.Lines(text) {
			line = strings.TrimSpace(line)
			f := strings.Fields(line)
			switch {
			case builtIn.MatchString(line), canary.MatchString(line):
			case len(f) > 1 && (f[0] == "add" || f[0] == "-A" || f[0] == "-a"): // of a set, a chain or a virtual server
				out.add(args[0]+": "+f[1], line)
			default:
				out.add(args[0], line)
			}
		}
	}
	return out, ctx.Err()
}

func (k kernelState) add(what, line string) { k[what] = append(k[what], line) }

var (
	nftObject = regexp.MustCompile(`^\t(\w+ \S+) \{$`)
	nftTable  = regexp.MustCompile(`^table (.*) \{$`)
	// shared matches the objects that mode nftables creates for the first Service that
	// needs one and keeps until it writes the table again, by design: chains that many
	// Services share, at most some hundreds, and the maps that lead to them.
	shared = regexp.MustCompile(`proxier (chain ((firewall-)?((cluster-ip|external|local|sticky|choose|pool)-\S+|sticky|no-endpoints|no-local-endpoints))|map (internal-|own-|sticky-)?handlers)$`)
	// counters matches the sets that count traffic: their elements depend on which
	// Services had traffic.
	counters = regexp.MustCompile(`proxier set (connections|refused-packets|dropped-packets)$`)
	// size matches the capacity of a set, which grows with the set.
	size = regexp.MustCompile(`^size \d+$`)
	// sources matches the sets of source ranges, one for each prefix length, which are kept
	// like shared objects. Only their elements count.
	sources = regexp.MustCompile(`proxier set allowed-sources-\d+$`)
)

// addNFT adds a listing of nftables, without shared objects and without other tables' base
// chains that hold no rule.
func (k kernelState) addNFT(listing string) {
	// A full replacement swaps the table for one of the other name.
	for _, family := range []string{"ip", "ip6"} {
		name := "table " + family + " proxier"
		if !strings.Contains(listing, name+" {") {
			listing = strings.Replace(listing, name+"-shadow {", name+" {", 1)
		}
	}
	table, object := "", ""
	var lines []string
	for line := range strings.Lines(listing) {
		line = strings.TrimSuffix(line, "\n")
		text := strings.TrimSpace(line)
		if m := nftTable.FindStringSubmatch(line); m != nil {
			table, object, lines = m[1], "", nil
			continue
		}
		if m := nftObject.FindStringSubmatch(line); m != nil {
			object, lines = "nft: "+table+" "+m[1], nil
			continue
		}
		switch {
		case line == "\t}":
			base := len(lines) == 1 && strings.HasPrefix(lines[0], "type ") && strings.HasSuffix(lines[0], "policy accept;")
			switch own := strings.HasSuffix(table, " proxier"); {
			case shared.MatchString(object), counters.MatchString(object), canary.MatchString(object), !own && base:
			case sources.MatchString(object) && !strings.Contains(strings.Join(lines, " "), "elements"):
			default:
				k[object] = lines
			}
			object = ""
		case text == "" || text == "}" || size.MatchString(text) || strings.Contains(text, "@allowed-sources-"):
		case object == "":
			k.add("nft: "+table, text)
		default:
			lines = append(lines, text)
		}
	}
}

// differences returns the lines that only one of two states has.
func (k kernelState) differences(want kernelState) []string {
	var out []string
	both := maps.Clone(want)
	maps.Copy(both, k)
	for _, what := range slices.Sorted(maps.Keys(both)) {
		count := map[string]int{}
		for _, line := range k[what] {
			count[line]++
		}
		for _, line := range want[what] {
			count[line]--
		}
		for _, line := range slices.Sorted(maps.Keys(count)) {
			switch n := count[line]; {
			case n > 0:
				out = append(out, fmt.Sprintf("%s: too much: %.200s", what, line))
			case n < 0:
				out = append(out, fmt.Sprintf("%s: missing: %.200s", what, line))
			}
		}
	}
	return out
}

var quoted = regexp.MustCompile(`"[^"]*"`)

// objects returns the size of each object: the number of elements of an nftables set or
// map, and the number of lines of any other object. Sets and maps whose elements expire
// are left out.
func (k kernelState) objects() map[string]int {
	out := map[string]int{}
	for what, lines := range k {
		n, elements, expires := 0, false, false
		for _, line := range lines {
			switch {
			case !strings.HasPrefix(what, "nft: ") || strings.Contains(what, " chain "):
				n++
			case strings.HasPrefix(line, "timeout ") || strings.HasPrefix(line, "flags ") && strings.Contains(line, "timeout"):
				expires = true
			case elements || strings.HasPrefix(line, "elements = {"):
				line = quoted.ReplaceAllString(line, "")
				n += strings.Count(line, ",")
				if elements = !strings.HasSuffix(line, "}"); !elements {
					n++
				}
			}
		}
		if !expires {
			out[what] = n
		}
	}
	return out
}

// measure measures the agent's resource usage and lists the kernel's state.
func (s *soak) measure(ctx context.Context, when string) (m measured, err error) {
	if m.kernel, err = s.dump(ctx); err != nil {
		return m, err
	}
	if m.usage, err = s.agent.usage(); err != nil {
		return m, err
	}
	m.usage.Objects = m.kernel.objects()
	s.rec.usage(when, m.usage)
	return m, nil
}

type measured struct {
	kernel kernelState
	usage  Usage
	// room is how many bytes more the heap may use in a later measurement.
	room int
}

const (
	// heapShare and heapSlack bound the growth of the agent's heap since its cold start, as
	// a share and in bytes: Go's maps do not shrink, and buffers are kept for the next
	// change.
	heapShare, heapSlack = 0.25, 8 << 20
	// roomShare is the share of the heap with all Services that may stay in use after they
	// are deleted: the capacity of maps and lists.
	roomShare = 0.05
	// The agent may have so many more goroutines, files and sockets than before.
	// Connections of its servers' clients, and sockets of watches, come and go.
	moreGoroutines, moreFiles, moreSockets = 4, 1, 4
)

// heapProfile is the file that receives the agent's heap profile if something is left over.
const heapProfile = "heap.pprof"

// ipvsTimeout is the longest time for which IPVS keeps a TCP connection that has ended or that
// was never answered (net/netfilter/ipvs/ip_vs_proto_tcp.c: two minutes). A virtual server of a
// deleted Service drains until then.
const ipvsTimeout = 2 * time.Minute

// same compares the agent and the kernel with an earlier measurement and records leftovers.
func (s *soak) same(ctx context.Context, when string, want measured) error {
	var got measured
	var left []string
	limit := s.o.drain
	if s.o.mode == "ipvs" {
		limit += ipvsTimeout
	}
	for end := time.Now().Add(limit); ; sleep(ctx, time.Second) {
		var err error
		if got, err = s.measure(ctx, when); err != nil {
			return err
		}
		if left = got.leftOver(want, when == whenEndsEmpty); len(left) == 0 || time.Now().After(end) {
			break
		}
	}
	for _, l := range left {
		s.rec.leftover("%s: %s", when, l)
	}
	if len(left) != 0 {
		profile, err := s.agent.get("/debug/pprof/heap?gc=1")
		if err == nil {
			err = os.WriteFile(filepath.Join(filepath.Dir(s.agent.dir), heapProfile), []byte(profile), 0o644)
		}
		if err != nil {
			return err
		}
	}
	if when == whenEndsEmpty {
		return s.flows()
	}
	return nil
}

// leftOver returns the leftovers since an earlier measurement. It compares the kernel's
// state line by line if exactly is set, and the sizes of objects otherwise.
func (got measured) leftOver(want measured, exactly bool) (out []string) {
	if limit := int(float64(want.usage.HeapBytes)*(1+heapShare)) + heapSlack + want.room; got.usage.HeapBytes > limit {
		out = append(out, fmt.Sprintf("the heap has %.1f MB in use, %.1f MB before", float64(got.usage.HeapBytes)/1e6, float64(want.usage.HeapBytes)/1e6))
	}
	for _, c := range []struct {
		what            string
		got, want, more int
	}{
		{"goroutines", got.usage.Goroutine, want.usage.Goroutine, moreGoroutines},
		{"files", got.usage.Files, want.usage.Files, moreFiles},
		{"sockets", got.usage.Sockets, want.usage.Sockets, moreSockets},
	} {
		if c.got > c.want+c.more {
			out = append(out, fmt.Sprintf("%d %s, %d before", c.got, c.what, c.want))
		}
	}
	if exactly {
		list := got.kernel.differences(want.kernel)
		return append(out, list[:min(len(list), 20)]...)
	}
	for _, name := range slices.Sorted(maps.Keys(got.usage.Objects)) {
		if n, m := got.usage.Objects[name], want.usage.Objects[name]; n != m {
			out = append(out, fmt.Sprintf("%s: %d, %d before", name, n, m))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want.usage.Objects)) {
		if _, ok := got.usage.Objects[name]; !ok {
			out = append(out, name+" is missing")
		}
	}
	return out
}

// flows records UDP flows that the kernel still translates after all Services are deleted.
func (s *soak) flows() error {
	return s.net.node.Do(func() error {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			list, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return fmt.Errorf("connection tracking: %w", err)
			}
			n := 0
			for _, f := range list {
				if f.Forward.Protocol == unix.IPPROTO_UDP && !f.Forward.DstIP.Equal(f.Reverse.SrcIP) {
					if n++; n <= 5 {
						s.rec.leftover("flow %s", f)
					}
				}
			}
		}
		return nil
	})
}

// pristine compares the kernel's state with its state before the agent first started.
func (s *soak) pristine(ctx context.Context, want kernelState) error {
	got, err := s.dump(ctx)
	if err != nil {
		return err
	}
	list := got.differences(want)
	for _, l := range list[:min(len(list), 20)] {
		s.rec.leftover("after run --cleanup: %s", l)
	}
	return nil
}
