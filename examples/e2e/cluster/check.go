package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
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

// check writes what this machine has of what a cluster needs. It returns an error that names
// everything the machine lacks.
func check(has io.Writer) error {
	var lacks []string
	if os.Geteuid() != 0 {
		lacks = append(lacks, "root: run this as root")
	} else {
		fmt.Fprintln(has, "root")
	}
	packages := map[string]bool{}
	var install []string
	for _, n := range needed {
		path, err := exec.LookPath(n.name)
		switch {
		case err == nil:
			fmt.Fprintf(has, "program %s\n", path)
		case !packages[n.pkg]:
			packages[n.pkg] = true
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
	} else {
		fmt.Fprintln(has, "file system overlay")
	}
	if groups, _ := filepath.Glob("/sys/fs/cgroup/*"); len(groups) == 0 {
		lacks = append(lacks, "control groups, mounted at /sys/fs/cgroup")
	} else {
		fmt.Fprintln(has, "control groups at /sys/fs/cgroup")
	}
	if len(lacks) > 0 {
		return errors.New("this machine lacks\n  " + strings.Join(lacks, "\n  "))
	}
	fmt.Fprintln(has, "this machine has all that a cluster needs")
	for _, e := range unsupported() {
		fmt.Fprintf(has, "tests left out: %s (%s)\n", e.expression, e.why)
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
