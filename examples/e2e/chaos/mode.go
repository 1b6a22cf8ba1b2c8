//go:build linux

package main

import (
	"context"
	"os/exec"

	"github.com/go-proxier/proxier/nftables"
)

// mode is a data plane under test.
type mode struct {
	name string
	// args are the agent's flags.
	args []string
	// programs are the tools that faults and meaning need.
	programs []string
	// probe, if not nil, returns an error if the machine does not support the mode.
	probe func() error
	// faults are the faults of the mode's rules.
	faults []fault
	// read reads the state of the kernel without names and numbers that an agent chooses.
	read func(*node, environment) (meaning, error)
	// prepare, if not nil, prepares the environment of an agent on a node.
	prepare func() (environment, error)
}

// environment is what an agent needs besides a network namespace.
type environment struct {
	args []string
	wrap func(*exec.Cmd) *exec.Cmd
	// dir is a folder of pinned BPF objects.
	dir   string
	close func()
}

var modes = []*mode{
	{
		name: "nftables", args: []string{"--proxy-mode", "nftables"}, programs: []string{"nft"},
		faults: nftFaults, read: nftMeaning,
	},
	{
		name: "iptables", args: []string{"--proxy-mode", "iptables"}, programs: []string{"iptables-save", "ip6tables-save", "iptables-restore", "ip6tables-restore"},
		faults: iptablesFaults, read: iptablesMeaning,
	},
	{
		name: "ipvs", args: []string{"--proxy-mode", "ipvs"}, programs: []string{"iptables-save", "ip6tables-save", "ipset", "ipvsadm", "ip"},
		faults: ipvsFaults, read: ipvsMeaning, probe: probeIPVS,
	},
	{
		name: "sockets", args: []string{"--proxy-mode", "nftables", "--socket-lb"}, programs: []string{"nft", "unshare", "mount"},
		faults: append(socketFaults, nftFaults...), read: socketMeaning, probe: probeSockets, prepare: prepareSockets,
	},
	{
		name: "offload", args: []string{"--proxy-mode", "nftables", "--nftables-offload", "eth*,veth*"}, programs: []string{"nft"},
		faults: append(offloadFaults, nftFaults...), read: nftMeaning, probe: probeOffload,
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

// probeIPVS returns an error if the kernel has no IPVS.
func probeIPVS() error {
	n, err := newNode(nil)
	if err != nil {
		return err
	}
	defer n.close()
	_, err = n.Output("ipvsadm", "-Sn")
	return err
}

// probeOffload returns an error if the kernel has no flowtables.
func probeOffload() error {
	n, err := newNode(nil)
	if err != nil {
		return err
	}
	defer n.close()
	return nftables.Probe(context.Background(), nftables.Config{NetNS: n.File(), Offload: &nftables.Offload{Interfaces: []string{"*"}}})
}
