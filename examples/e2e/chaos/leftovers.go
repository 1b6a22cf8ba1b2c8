//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// lists holds the commands that list the kernel's state. Programs that are not installed are left
// out.
var lists = []string{
	"nft -s list ruleset", "iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save",
	"ipset save", "ipvsadm -Sn", "ip -o addr show",
}

var (
	// nothing matches the programs' errors if the kernel has no such objects.
	nothing = regexp.MustCompile(`does not exist|Protocol not available|Can't initialize ipvs|Table does not exist`)
	// ofServices matches the names and addresses of Services and of other nodes' pods, and
	// ofAgent the names of the agent's objects.
	ofServices = regexp.MustCompile(`\bworld/svc-\d+|\b10\.96\.\d+\.[1-9]\d*|\bfd00:96::[0-9a-f]+|\b198\.51\.100\.\d+|\b203\.0\.113\.\d+|` +
		`\b2001:db8:(e|1b)::[0-9a-f]+|\b10\.244\.128\.\d+|\bfd00:244:0:1:[0-9a-f:]+`)
	ofAgent = regexp.MustCompile(`\bKUBE-[\w-]+|\bkube-ipvs0\b|\bproxier[\w-]*`)
)

// remnants returns what the expressions match in the kernel's state, except some names.
func (n *node) remnants(except []string, of ...*regexp.Regexp) (out []string, err error) {
	for _, command := range lists {
		args := strings.Fields(command)
		if _, err := exec.LookPath(args[0]); err != nil {
			continue
		}
		text, err := n.Output(args[0], args[1:]...)
		if err != nil && !nothing.MatchString(err.Error()) {
			return nil, err
		}
		for line := range strings.Lines(text) {
			for _, r := range of {
				for _, name := range r.FindAllString(line, -1) {
					if !slices.Contains(except, name) {
						out = append(out, fmt.Sprintf("left over: %s: %s in %.200q", command, name, strings.TrimSpace(line)))
					}
				}
			}
		}
	}
	return out, nil
}

// staleFlows returns the UDP flows that the kernel translates to endpoints that their Services do not
// have. A flow of a deleted Service stays if no agent knew the Service, or if another program had restored
// its rules in the same time.
func (w *world) staleFlows() (out []string, err error) {
	v := w.oracle.now()
	err = w.node.Do(func() error {
		for f, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
			list, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
			if err != nil {
				return fmt.Errorf("connection tracking: %w", err)
			}
			for _, flow := range list {
				from, _ := netip.AddrFromSlice(flow.Forward.SrcIP)
				to, _ := netip.AddrFromSlice(flow.Forward.DstIP)
				server, _ := netip.AddrFromSlice(flow.Reverse.SrcIP)
				if flow.Forward.Protocol != unix.IPPROTO_UDP || to == server {
					continue
				}
				p := place{in: "eth1"}
				p.addr[f] = from.Unmap()
				t := target{netip.AddrPortFrom(to.Unmap(), flow.Forward.DstPort), v1.ProtocolUDP}
				at := netip.AddrPortFrom(server.Unmap(), flow.Reverse.SrcPort)
				svc := v.Trace(p.packet(t, v)).Port
				if svc == nil && !w.oracle.restarted.Load() && !w.restored || svc != nil && !slices.ContainsFunc(svc.Endpoints, func(e *tracker.Endpoint) bool { return e.Addr == at }) {
					out = append(out, fmt.Sprint("left over: flow ", flow))
				}
			}
		}
		return nil
	})
	return out, err
}

// ipvsTimeout is the longest time for which IPVS keeps a TCP connection that has ended or that
// was never answered (net/netfilter/ipvs/ip_vs_proto_tcp.c: two minutes). A virtual server of a
// deleted Service drains until then.
const ipvsTimeout = 2 * time.Minute

// end deletes all Services and ends the agent, and records what is left over.
func (w *world) end(ctx context.Context) error {
	w.rec.note("-- end")
	for _, x := range slices.Clone(w.node.extra) {
		if err := w.toggle(x); err != nil {
			return err
		}
	}
	w.objects.deleteServices()
	if err := w.judge(ctx); err != nil || w.rec.failed() {
		return err
	}
	w.traffic.end()
	// Mode nftables removes its entry for a removed endpoint with the first change after a second, not
	// by a timer.
	sleep(ctx, 1500*time.Millisecond)
	w.objects.setNode("")
	w.objects.setNode("last")
	limit := w.o.settle
	if w.mode.name == "ipvs" {
		limit += ipvsTimeout
	}
	var before map[string]float64
	for end, n := time.Now().Add(limit), 1; ; n++ {
		now, err := w.agent.usage() // which also removes the counters of the Services
		for name := range before {
			now[name] = min(now[name], before[name]) // connections of the clients of its servers come and go
		}
		before = now
		left, errLeft := w.node.remnants([]string{kubernetesIP}, ofServices)
		if err := errors.Join(err, errLeft); err != nil || ctx.Err() != nil {
			return err
		}
		if len(left) == 0 && n >= 20 || time.Now().After(end) {
			w.failAll(left)
			break
		}
		sleep(ctx, pollInterval)
	}
	if err := w.restart(syscall.SIGTERM, nil); err != nil {
		return err
	}
	w.failAll(w.wait(ctx))
	// The rules are right before the new agent has attached the programs of mode sockets again.
	excess, err := w.agent.excess(before)
	for end := time.Now().Add(w.o.settle); err == nil && len(excess) != 0 && time.Now().Before(end) && ctx.Err() == nil; {
		sleep(ctx, pollInterval)
		excess, err = w.agent.excess(before)
	}
	if err != nil {
		return err
	}
	w.failAll(excess)
	if err := w.agent.Stop(syscall.SIGTERM); err != nil {
		w.rec.failf("%v", err)
	}
	if err := w.agent.cleanUp(); err != nil {
		w.rec.failf("run --cleanup: %v", err)
	}
	// The guard of the loopback range stays for as long as the sysctl route_localnet (iptables/DESIGN.md).
	left, err := w.node.remnants([]string{"KUBE-PROXY-LOCALNET"}, ofServices, ofAgent)
	if err != nil {
		return err
	}
	files, err := os.ReadDir(w.agent.dir)
	for _, f := range files {
		left = append(left, "left over: the agent's file "+f.Name())
	}
	w.failAll(left)
	return err
}

// failAll records failures.
func (w *world) failAll(list []string) {
	for _, text := range list {
		w.rec.failf("%s", text)
	}
}
