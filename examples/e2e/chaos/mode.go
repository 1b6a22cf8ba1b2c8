//go:build linux

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
)

// mode is a data plane under test.
type mode struct {
	name string
	// args are the agent's flags.
	args []string
	// nodePorts is the value of --nodeport-addresses.
	nodePorts string
	// needs is a shell command that succeeds on a host without rules if the machine supports the mode, and probe, if
	// not nil, returns an error if it does not.
	needs string
	probe func(*netlab.Host) error
	// faults are the faults of the mode's rules.
	faults []fault
	// flavor ends the names of the iptables tools.
	flavor string
	// prepare, if not nil, prepares a world for its agents.
	prepare func(*world) error
}

var modes = []*mode{
	{
		name: "nftables", args: []string{"--proxy-mode", "nftables"}, nodePorts: "primary",
		needs: "nft list ruleset", faults: nftFaults,
	},
	{
		name: "iptables", args: []string{"--proxy-mode", "iptables"}, nodePorts: "all",
		needs: "iptables-save && ip6tables-save", faults: iptablesFaults,
	},
	{
		name: "iptables-legacy", args: []string{"--proxy-mode", "iptables", "--iptables-flavor", "legacy"}, nodePorts: "all",
		needs: "iptables-legacy-save && ip6tables-legacy-save", faults: iptablesFaults, flavor: "-legacy",
	},
	{
		// IPVS may keep a connection that has ended for the time of an open one (15 minutes by
		// default), if two processors handle its last packets. Its endpoint drains as long.
		name: "ipvs", args: []string{"--proxy-mode", "ipvs", "--ipvs-tcp-timeout", "2m"}, nodePorts: "all",
		needs: "iptables-save && ip6tables-save && ipset list && ipvsadm -Sn", faults: ipvsFaults,
	},
	{
		name: "sockets", args: []string{"--proxy-mode", "nftables", "--socket-lb"}, nodePorts: "primary",
		needs: "nft list ruleset && unshare -m mount", probe: probeSockets, faults: append(socketFaults, nftFaults...), prepare: prepareSockets,
	},
	{
		name: "offload", args: []string{"--proxy-mode", "nftables", "--nftables-offload", "eth*,veth*"}, nodePorts: "primary",
		needs: "nft list ruleset", faults: append(offloadFaults, nftFaults...),
		probe: func(h *netlab.Host) error {
			return nftables.Probe(context.Background(), nftables.Config{NetNS: h.File(), Offload: &nftables.Offload{Interfaces: []string{"*"}}})
		},
	},
}

func modeNames() (out []string) {
	for _, m := range modes {
		out = append(out, m.name)
	}
	return out
}

// supported returns an error that names what the mode lacks on this machine.
func (m *mode) supported() error {
	lab := netlab.New()
	defer lab.Close()
	h := lab.Host("probe")
	lab.Do(func() error {
		_, err := h.Output("sh", "-c", "ip link && "+m.needs)
		return err
	})
	if m.probe != nil {
		lab.Do(func() error { return m.probe(h) })
	}
	return lab.Err
}

// judges reports whether a mode does what a verdict says. IPVS takes all packets to an address that
// is bound, and documents other differences where it does not forward (ipvs/DESIGN.md).
func (m *mode) judges(v ruleset.Verdict) bool {
	return m.name != "ipvs" || v.Action == ruleset.ActionForward
}

// keeps reports whether a connection is forwarded and may live for as long as its endpoint. In
// mode ipvs, connections from this node's pods under externalTrafficPolicy Local end when the
// Service loses the external or load-balancer IP (ipvs/DESIGN.md).
func (m *mode) keeps(from *place, v ruleset.Verdict) bool {
	if v.Action != ruleset.ActionForward {
		return false
	}
	return m.name != "ipvs" || !strings.HasPrefix(from.in, "veth") || v.Frontend.Kind == ruleset.KindNodePort || !v.Frontend.ShortCircuit()
}

// probeSockets returns an error if this process cannot load socket programs.
func probeSockets(*netlab.Host) error {
	dir, closeDir, err := socketlb.TemporaryDir()
	if err != nil {
		return err
	}
	root, err := socketlb.RootCgroup()
	if err == nil {
		err = socketlb.Probe(context.Background(), socketlb.Config{Dir: dir, Cgroup: root})
	}
	return errors.Join(err, closeDir())
}

// pinned is the folder of an agent in the BPF file system.
const pinned = "proxier-socketlb"

// prepareSockets gives a world's agents a BPF file system and a cgroup without processes.
func prepareSockets(w *world) error {
	root, err := socketlb.RootCgroup()
	if err != nil {
		return err
	}
	cgroup, err := os.MkdirTemp(root, "chaos-")
	if err != nil {
		return err
	}
	w.atEnd(func() { os.Remove(cgroup) })
	w.bpf = filepath.Join(w.dir, "bpf")
	if err := errors.Join(os.Mkdir(w.bpf, 0o755), os.NewSyscallError("mount", unix.Mount("bpf", w.bpf, "bpf", 0, ""))); err != nil {
		return err
	}
	w.atEnd(func() { unix.Unmount(w.bpf, unix.MNT_DETACH) })
	w.args = append(w.args, "--socket-lb-cgroup", cgroup)
	script := `mount --make-rprivate / && mount --bind "$0" /sys/fs/bpf && exec "$@"`
	w.command = append([]string{"unshare", "-m", "sh", "-c", script, w.bpf}, w.command...)
	return nil
}
