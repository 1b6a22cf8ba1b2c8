//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// lists holds the commands that list the kernel's state. Programs that are not installed are left
// out.
var lists = []string{
	"nft -s list ruleset", "iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save",
	"ipset save", "ipvsadm -Sn", "ip -o addr show",
}

var (
	// nothing matches the programs' errors if the kernel has no such objects.
	nothing = regexp.MustCompile(`does not exist|Protocol not available|Can't initialize ipvs`)
	// ofServices matches the names and addresses of Services and of other nodes' pods, and
	// ofAgent the names of the agent's objects.
	ofServices = regexp.MustCompile(`\bsvc-\d+|\b10\.96\.[1-9]\d*\.\d+|\bfd00:10:96::[0-9a-f]+|\b198\.1[89]\.\d+\.\d+|` +
		`\b2001:db8:[be]:[0-9a-f:]+|\b10\.244\.(12[89]|1[3-9]\d|2\d\d)\.\d+|\bfd00:10:244:2:[0-9a-f:]+`)
	ofAgent = regexp.MustCompile(`\bKUBE-[\w-]+|\bkube-ipvs0\b|\bproxier[\w-]*`)
	// ofBarrier holds what the barrier's Service has.
	ofBarrier = []string{"svc-0", clusterIPs[0], clusterIPs[1]}
)

// remnants returns what the expressions match in the kernel's state, except some names.
func (s *soak) remnants(except []string, of ...*regexp.Regexp) (out []string, err error) {
	for _, command := range lists {
		args := strings.Fields(command)
		if _, err := exec.LookPath(args[0]); err != nil {
			continue
		}
		text, err := s.net.node.Output(args[0], args[1:]...)
		if err != nil && !nothing.MatchString(err.Error()) {
			return nil, err
		}
		for line := range strings.Lines(text) {
			for _, r := range of {
				for _, name := range r.FindAllString(line, -1) {
					if !slices.Contains(except, name) {
						out = append(out, fmt.Sprintf("%s: %s in %.200q", command, name, strings.TrimSpace(line)))
					}
				}
			}
		}
	}
	return out, nil
}

// flows returns the UDP flows that the kernel translates.
func (s *soak) flows() (out []string, err error) {
	err = s.net.node.Do(func() error {
		for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			list, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return fmt.Errorf("connection tracking: %w", err)
			}
			for _, f := range list {
				if f.Forward.Protocol == unix.IPPROTO_UDP && !f.Forward.DstIP.Equal(f.Reverse.SrcIP) {
					out = append(out, fmt.Sprint("flow ", f))
				}
			}
		}
		return nil
	})
	return out, err
}

// allowance holds what the agent's metrics may grow by. Go's maps do not shrink, buffers are kept for
// the next change, and connections of the clients of its servers come and go.
var allowance = map[string]float64{"go_memstats_heap_alloc_bytes": 12 << 20, "go_goroutines": 4, "process_open_fds": 5}

// ipvsTimeout is the longest time for which IPVS keeps a TCP connection that has ended or that
// was never answered (net/netfilter/ipvs/ip_vs_proto_tcp.c: two minutes). A virtual server of a
// deleted Service drains until then.
const ipvsTimeout = 2 * time.Minute

// leftovers records what is left over after all Services were deleted. first is the agent's resource
// usage before there were any. It waits for grace periods and timeouts.
func (s *soak) leftovers(ctx context.Context, first map[string]float64) error {
	limit := s.o.drain
	if s.o.mode == "ipvs" {
		limit += ipvsTimeout
	}
	for end := time.Now().Add(limit); ctx.Err() == nil; sleep(ctx, time.Second) {
		now, err := s.usage()
		remnants, err2 := s.remnants(ofBarrier, ofServices)
		flows, err3 := s.flows()
		if err := errors.Join(err, err2, err3); err != nil {
			return err
		}
		left := slices.Concat(remnants, flows)
		for name, more := range allowance {
			if now[name] > first[name]+more {
				left = append(left, fmt.Sprintf("the agent's %s: %.0f, at first %.0f", name, now[name], first[name]))
			}
		}
		if len(left) == 0 || time.Now().After(end) {
			s.rec.leftover(left)
			return nil
		}
	}
	return ctx.Err()
}

// cleanUp runs the agent's clean-up and records what is left over.
func (s *soak) cleanUp() error {
	if err := s.cleanup(); err != nil {
		s.rec.failf("run --cleanup: %v", err)
	}
	left, err := s.remnants(nil, ofServices, ofAgent)
	if err != nil {
		return err
	}
	files, err := os.ReadDir(s.agent.Dir)
	for _, f := range files {
		left = append(left, "the agent's file "+f.Name())
	}
	s.rec.leftover(left)
	return err
}

// cleanup runs nodeproxy run --cleanup.
func (s *soak) cleanup() error {
	cmd, err := s.agent.Command("run", "--cleanup")
	if err != nil {
		return err
	}
	return cmd.Wait()
}

// usageMetric matches the metrics of the agent's resource usage.
var usageMetric = regexp.MustCompile(`(?m)^(go_memstats_heap_alloc_bytes|go_goroutines|process_open_fds) (\S+)$`)

// usage returns the agent's resource usage after a garbage collection.
func (s *soak) usage() (map[string]float64, error) {
	for range 3 { // a collection runs finalizers, which release more memory for the next one
		if _, err := s.agent.Get(metricsAddr + "/debug/pprof/heap?gc=1"); err != nil {
			return nil, err
		}
	}
	text, err := s.agent.Get(metricsAddr + "/metrics")
	out := map[string]float64{}
	for _, m := range usageMetric.FindAllSubmatch(text, -1) {
		if out[string(m[1])], err = strconv.ParseFloat(string(m[2]), 64); err != nil {
			return nil, err
		}
	}
	if err == nil && len(out) != len(allowance) {
		err = fmt.Errorf("/metrics has only %v", out)
	}
	s.rec.log.Printf("the agent: %v", out)
	return out, err
}
