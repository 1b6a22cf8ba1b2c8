//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
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

	"github.com/go-proxier/proxier/ruleset"
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
	// ofServices matches the names and addresses of Services and of other nodes' pods, and ofAgent those and the
	// names of the agent's objects.
	ofServices = regexp.MustCompile(servicesPattern)
	ofAgent    = regexp.MustCompile(servicesPattern + `|\b` + kubernetesIP + `\b|\bKUBE-[\w-]+|\bkube-ipvs0\b|\bproxier[\w-]*`)
)

const servicesPattern = `\bworld/svc-\d+|\b10\.96\.\d+\.[1-9]\d*|\bfd00:96::[0-9a-f]+|\b198\.51\.100\.\d+|\b203\.0\.113\.\d+|` +
	`\b2001:db8:(e|1b)::[0-9a-f]+|\b10\.244\.128\.\d+|\bfd00:244:0:1:[0-9a-f:]+`

// remnants returns what an expression matches in the kernel's state. The guard of the loopback range may stay, for as
// long as the sysctl route_localnet (iptables/DESIGN.md).
func (n *node) remnants(of *regexp.Regexp) (out []string, err error) {
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
			for _, name := range of.FindAllString(line, -1) {
				if name != "KUBE-PROXY-LOCALNET" {
					out = append(out, fmt.Sprintf("left over: %s: %s in %.200q", command, name, strings.TrimSpace(line)))
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
	addr := func(ip net.IP) netip.Addr { a, _ := netip.AddrFromSlice(ip); return a.Unmap() }
	err = w.node.Do(func() error {
		list, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		six, err6 := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET6)
		for _, flow := range append(list, six...) {
			to, server := flow.Forward, netip.AddrPortFrom(addr(flow.Reverse.SrcIP), flow.Reverse.SrcPort)
			if to.Protocol != unix.IPPROTO_UDP || addr(to.DstIP) == server.Addr() {
				continue
			}
			svc := v.Trace(ruleset.Packet{
				From: addr(to.SrcIP), InInterface: "eth1", Protocol: v1.ProtocolUDP, To: netip.AddrPortFrom(addr(to.DstIP), to.DstPort), NodeAddresses: v.local,
			}).Port
			if svc == nil && !w.oracle.restarted.Load() && !w.restored || svc != nil && !has(svc, server) {
				out = append(out, fmt.Sprint("left over: flow ", flow))
			}
		}
		return errors.Join(err, err6)
	})
	return out, err
}

// end deletes all Services and ends the agent, and records what is left over.
func (w *world) end(ctx context.Context) error {
	w.rec.note("-- end")
	for _, x := range slices.Clone(w.node.extra) {
		if err := w.toggle(x); err != nil {
			return err
		}
	}
	w.objects.deleteServices()
	if w.judge(ctx); !w.goesOn(ctx) {
		return nil
	}
	w.traffic.end()
	// Mode nftables removes its entry for a removed endpoint with the first change after a second, not
	// by a timer.
	sleep(ctx, 1500*time.Millisecond)
	w.objects.setNode("")
	w.objects.setNode("last")
	limit := w.o.settle
	if w.mode.name == "ipvs" {
		// IPVS keeps a TCP connection that has ended or was never answered for so long (ip_vs_proto_tcp.c), and
		// with it the virtual server of a deleted Service.
		limit += 2 * time.Minute
	}
	w.require(ctx, limit, func() ([]string, error) {
		if _, err := w.usage(); err != nil { // which also removes the counters of the Services
			return nil, err
		}
		return w.node.remnants(ofServices)
	})
	before, err := w.usage()
	for range 20 { // connections of the clients of the agent's servers come and go
		if err != nil {
			return err
		}
		sleep(ctx, 250*time.Millisecond)
		var now map[string]float64
		now, err = w.usage()
		for name := range before {
			before[name] = min(now[name], before[name])
		}
	}
	if err := w.restart(syscall.SIGTERM, nil); err != nil {
		return err
	}
	w.require(ctx, w.o.settle, w.wrong)
	// The rules are right before the new agent has attached the programs of mode sockets again.
	w.require(ctx, w.o.settle, func() ([]string, error) { return w.excess(before) })
	if err := w.agent.Stop(syscall.SIGTERM); err != nil {
		w.rec.failf("%v", err)
	}
	w.cleanUp()
	w.require(ctx, 0, func() ([]string, error) {
		left, err := w.node.remnants(ofAgent)
		files, errFiles := os.ReadDir(w.tmp)
		for _, f := range files {
			left = append(left, "left over: the agent's file "+f.Name())
		}
		return left, errors.Join(err, errFiles)
	})
	return nil
}

// require records what wrong still finds after the time.
func (w *world) require(ctx context.Context, limit time.Duration, wrong func() ([]string, error)) {
	for _, text := range w.until(ctx, limit, wrong) {
		if ctx.Err() == nil {
			w.rec.failf("%s", text)
		}
	}
}
