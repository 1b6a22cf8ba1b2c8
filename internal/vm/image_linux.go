package vm

import (
	"debug/elf"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// modules lists the modules that tests may need, by name or pattern. The machine loads all of
// them at boot, because it has no program that loads modules on demand.
var modules = []string{
	"veth", "dummy", "bridge", "crc32c_generic",
	"nfnetlink", "nf_conntrack_netlink", "nf_tables", "nft_*", "nf_reject_*", "nf_flow_table*",
	"ip_tables", "ip6_tables", "iptable_*", "ip6table_*", "ipt_REJECT", "ip6t_REJECT",
	"xt_addrtype", "xt_comment", "xt_conntrack", "xt_connmark", "xt_mark", "xt_MASQUERADE", "xt_multiport",
	"xt_nat", "xt_physdev", "xt_recent", "xt_set", "xt_statistic", "xt_tcpudp", "xt_sctp", "xt_limit", "xt_CT",
	"xt_LOG", "xt_NFLOG", "xt_hashlimit", "xt_pkttype", "xt_owner", "xt_ipvs", "xt_u32", "xt_nfacct", "xt_bpf", "xt_iprange",
	"ip_set_*", "ip_vs", "ip_vs_*", "nf_log_syslog", "ipip", "ip6_tunnel",
}

// unwanted lists modules that match modules but are not needed.
var unwanted = map[string]bool{"ip_vs_ftp": true, "ip_vs_pe_sip": true}

// tools lists the programs to copy from the host if they are installed there.
var tools = []string{
	"nft", "conntrack", "ip", "ipset", "ipvsadm", "tcpdump",
	"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore",
	"iptables-nft", "iptables-nft-save", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-save", "ip6tables-nft-restore",
	"iptables-legacy", "iptables-legacy-save", "iptables-legacy-restore", "ip6tables-legacy", "ip6tables-legacy-save", "ip6tables-legacy-restore",
}

// initScript is the machine's first program. It runs the test, with its output on the second
// serial port, and reports the status on the third. Earlier errors go to the first serial port,
// the console.
const initScript = `#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
for p in ttyS1 ttyS2; do stty -F /dev/$p raw -echo; done
# No tunnel device in each namespace.
echo 1 >/proc/sys/net/core/fb_tunnels_only_for_init_net
while read -r m; do insmod /modules/$m || echo "cannot load $m"; done </modules/order
# All namespaces share one table of neighbours.
for f in ipv4 ipv6; do for n in 1 2 3; do echo 65536 >/proc/sys/net/$f/neigh/default/gc_thresh$n; done; done
# All namespaces share one limit of ICMP errors, too.
for f in msgs_per_sec msgs_burst; do echo 1000000 >/proc/sys/net/ipv4/icmp_$f; done
. /environment
cd /work
set --
while IFS= read -r a; do set -- "$@" "$a"; done </arguments
echo ` + started + ` >/dev/ttyS1
/test "$@" </dev/null >/dev/ttyS1 2>&1
echo "status $?" >/dev/ttyS2
poweroff -f
`

// writeImage writes the initial RAM file system that runs the program with the
// arguments and environment, in a folder with the same testdata.
func writeImage(w io.Writer, k *kernel, program string, args, env []string) error {
	a := newArchive(w)
	for _, d := range []string{"proc", "sys", "dev", "tmp", "run", "bin", "sbin", "etc", "root", "work", "modules", "var/lib"} {
		a.dir(d)
	}
	a.file("init", []byte(initScript))
	a.file("arguments", []byte(strings.Join(args, "\n")+"\n"))
	var exports strings.Builder
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		fmt.Fprintf(&exports, "export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	a.file("environment", []byte(exports.String()))
	a.link("var/run", "/run")
	// All modules are loaded at boot.
	a.link("sbin/modprobe", "/bin/true")

	if data, err := os.ReadFile("/etc/protocols"); err == nil {
		a.file("etc/protocols", data)
	}
	if err := a.program(program, "test"); err != nil {
		return err
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	if err := a.program(busybox, "bin/busybox"); err != nil {
		return err
	}
	for _, name := range tools {
		if path, err := lookTool(name); err == nil {
			if err := a.program(path, "sbin/"+name); err != nil {
				return err
			}
		}
	}
	plugins, err := filepath.Glob("/usr/lib/*/xtables/*.so")
	if err != nil {
		return err
	}
	for _, path := range plugins {
		if err := a.program(path, strings.TrimPrefix(path, "/")); err != nil {
			return err
		}
	}
	if err := a.tree("testdata", "work/testdata"); err != nil {
		return err
	}
	names := slices.DeleteFunc(k.matching(modules...), func(n string) bool { return unwanted[n] })
	files, err := k.ordered(names)
	if err != nil {
		return err
	}
	var order strings.Builder
	for _, f := range files {
		fmt.Fprintln(&order, filepath.Base(f))
		if err := a.copy(f, "modules/"+filepath.Base(f)); err != nil {
			return err
		}
	}
	a.file("modules/order", []byte(order.String()))
	return a.close()
}

// lookTool finds a tool, also in folders that are not on an ordinary user's PATH.
func lookTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err == nil {
			break
		}
		path, err = exec.LookPath(filepath.Join(dir, name))
	}
	return path, err
}

// copy copies a file of this machine.
func (a *archive) copy(from, to string) error {
	data, err := os.ReadFile(from)
	if err == nil {
		a.file(to, data)
	}
	return err
}

// program copies a program, or a library, with all the libraries it needs.
func (a *archive) program(from, to string) error {
	if a.have[to] {
		return nil
	}
	if err := a.copy(from, to); err != nil {
		return err
	}
	f, err := elf.Open(from)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	defer f.Close()
	for _, s := range f.Progs {
		if s.Type != elf.PT_INTERP {
			continue
		}
		name, err := io.ReadAll(s.Open())
		if err != nil {
			return err
		}
		loader := strings.TrimRight(string(name), "\x00")
		if err := a.copy(loader, strings.TrimPrefix(loader, "/")); err != nil {
			return err
		}
	}
	libs, err := f.ImportedLibraries()
	if err != nil {
		return err
	}
	for _, lib := range libs {
		path, err := findLibrary(lib)
		if err != nil {
			return fmt.Errorf("%s: %w", from, err)
		}
		if err := a.program(path, strings.TrimPrefix(path, "/")); err != nil {
			return err
		}
	}
	return nil
}

// findLibrary searches the folders of Debian's loader.
func findLibrary(name string) (string, error) {
	for _, dir := range []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/lib", "/usr/lib"} {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("library %s: %w", name, fs.ErrNotExist)
}

// tree copies a folder with its contents, if it exists.
func (a *archive) tree(from, to string) error {
	err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		return a.copy(path, filepath.Join(to, rel))
	})
	if os.IsNotExist(err) {
		return nil
	}
	return err
}
