//go:build linux

package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

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
	// programs are the tools that faults need.
	programs []string
	// probe, if not nil, returns an error if the machine does not support the mode.
	probe func() error
	// faults are the faults of the mode's rules.
	faults []fault
	// prepare, if not nil, prepares the environment of an agent on a node.
	prepare func() (environment, error)
}

// environment is what an agent needs besides a network namespace.
type environment struct {
	args []string
	wrap func(*exec.Cmd) *exec.Cmd
	// dir is a folder of pinned BPF objects.
	dir string
	// path is a folder of programs that come before those of the machine, or "".
	path  string
	close func()
}

var modes = []*mode{
	{
		name: "nftables", args: []string{"--proxy-mode", "nftables"}, nodePorts: "primary", programs: []string{"nft"},
		faults: nftFaults,
	},
	{
		name: "iptables", args: []string{"--proxy-mode", "iptables"}, nodePorts: "all", programs: []string{"iptables-save", "ip6tables-save", "iptables-restore", "ip6tables-restore"},
		faults: iptablesFaults,
	},
	{
		name: "iptables-legacy", args: []string{"--proxy-mode", "iptables", "--iptables-flavor", "legacy"}, nodePorts: "all", programs: []string{"iptables-legacy", "ip6tables-legacy"},
		faults: iptablesFaults, prepare: prepareLegacy,
	},
	{
		// IPVS may keep a connection that has ended for the time of an open one (15 minutes by
		// default), if two processors handle its last packets. Its endpoint drains as long.
		name: "ipvs", args: []string{"--proxy-mode", "ipvs", "--ipvs-tcp-timeout", "2m"}, nodePorts: "all", programs: []string{"iptables-save", "ip6tables-save", "ipset", "ipvsadm", "ip"},
		faults: ipvsFaults, probe: probeIPVS,
	},
	{
		name: "sockets", args: []string{"--proxy-mode", "nftables", "--socket-lb"}, nodePorts: "primary", programs: []string{"nft", "unshare", "mount"},
		faults: append(socketFaults, nftFaults...), probe: probeSockets, prepare: prepareSockets,
	},
	{
		name: "offload", args: []string{"--proxy-mode", "nftables", "--nftables-offload", "eth*,veth*"}, nodePorts: "primary", programs: []string{"nft"},
		faults: append(offloadFaults, nftFaults...), probe: probeOffload,
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
	for _, p := range m.programs {
		if _, err := exec.LookPath(p); err != nil {
			return err
		}
	}
	if m.probe == nil {
		return nil
	}
	return m.probe()
}

func (m *mode) environment() (environment, error) {
	if m.prepare == nil {
		return environment{close: func() {}}, nil
	}
	return m.prepare()
}

// prepareLegacy creates a folder in which iptables has the legacy flavor, whatever the machine's is.
func prepareLegacy() (e environment, err error) {
	if e.path, err = os.MkdirTemp("", "chaos-legacy-"); err != nil {
		return e, err
	}
	e.close = func() { os.RemoveAll(e.path) }
	for _, tool := range []string{"iptables", "ip6tables"} {
		for _, action := range []string{"", "-save", "-restore"} {
			program, lookErr := exec.LookPath(tool + "-legacy" + action)
			err = errors.Join(err, lookErr, os.Symlink(program, filepath.Join(e.path, tool+action)))
		}
	}
	return e, err
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

func probeIPVS() error {
	n, err := newNode()
	if err != nil {
		return err
	}
	defer n.lab.Close()
	_, err = n.Output("ipvsadm", "-Sn")
	return err
}

// probeOffload returns an error if the kernel has no flowtables.
func probeOffload() error {
	n, err := newNode()
	if err != nil {
		return err
	}
	defer n.lab.Close()
	return nftables.Probe(context.Background(), nftables.Config{NetNS: n.File(), Offload: &nftables.Offload{Interfaces: []string{"*"}}})
}
