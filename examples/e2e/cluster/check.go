package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// cniPlugins is the folder of the programs of Debian's package containernetworking-plugins.
const cniPlugins = "/usr/lib/cni"

// program is a program of this machine, with its Debian package.
type program struct{ name, pkg string }

// needed lists the programs that a cluster runs.
var needed = []program{
	{"conntrack", "conntrack"},
	{"containerd", "containerd"},
	{"ctr", "containerd"},
	{"debootstrap", "debootstrap"},
	{"gcc", "gcc libc6-dev"},
	{"go", "golang"},
	{"ip", "iproute2"},
	{"iptables", "iptables"},
	{"nft", "nftables"},
	{"runc", "runc"},
	{cniPlugins + "/ptp", "containernetworking-plugins"},
	{cniPlugins + "/portmap", "containernetworking-plugins"},
}

// check returns an error that names everything the machine lacks of what a cluster needs.
func check() error {
	var lacks, install []string
	if os.Geteuid() != 0 {
		lacks = append(lacks, "root: run this as root")
	}
	for _, n := range needed {
		if _, err := exec.LookPath(n.name); err != nil && !slices.Contains(install, n.pkg) {
			install = append(install, n.pkg)
		}
	}
	if len(install) > 0 {
		lacks = append(lacks, "programs: apt-get install "+strings.Join(install, " "))
	}
	filesystems, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return err
	}
	if !strings.Contains(string(filesystems), "\toverlay\n") {
		lacks = append(lacks, "file system overlay: modprobe overlay")
	}
	if groups, _ := filepath.Glob("/sys/fs/cgroup/*"); len(groups) == 0 {
		lacks = append(lacks, "control groups, mounted at /sys/fs/cgroup")
	}
	if len(lacks) > 0 {
		return errors.New("this machine lacks\n  " + strings.Join(lacks, "\n  "))
	}
	return nil
}

// exclusion is an expression that matches names of tests that cannot run.
type exclusion struct{ expression, why string }

// unsupported returns the tests that cannot run in a cluster on this machine.
func unsupported() []exclusion {
	e := []exclusion{
		{`Feature:Networking-(IPv4|IPv6|DNS)`, "no internet"},
		{`Disruptive`, "no SSH to nodes, and the proxy does not run in a pod"},
		{`DNS configMap nameserver`, "CoreDNS does not run in a pod, and has no ConfigMap"},
		{`Feature:PerformanceDNS`, "a test of DNS alone, with 10,000 Services"},
		{`Networking IPerf2`, "Debian's iperf prints fewer columns than the test expects"},
		{`LocalhostNodePorts should let a node pull an image`, "the agnhost that is built here has no image for its registry"},
		{`Netpol (NetworkPolicy|\[LinuxOnly\]|\[Feature)`, "CNI plugin ptp has no network policies"},
	}
	if fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP); err == nil {
		unix.Close(fd)
	} else {
		e = append(e, exclusion{`Feature:SCTPConnectivity`, fmt.Sprintf("no SCTP in the kernel (%v)", err)})
	}
	return e
}
