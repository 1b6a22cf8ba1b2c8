package vm

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
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
	"vrf", "ip_set_*", "ip_vs", "ip_vs_*", "nf_log_syslog", "ipip", "ip6_tunnel", "ip_gre", "fou",
}

// unwanted lists modules that match modules but are not needed.
var unwanted = map[string]bool{"ip_vs_ftp": true, "ip_vs_pe_sip": true}

// tools lists the programs to copy from the host if they are installed there.
var tools = []string{
	"nft", "conntrack", "ip", "ipset", "ipvsadm", "tcpdump", "systemd", "systemctl",
	"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore",
	"iptables-nft", "iptables-nft-save", "iptables-nft-restore", "ip6tables-nft", "ip6tables-nft-save", "ip6tables-nft-restore",
	"iptables-legacy", "iptables-legacy-save", "iptables-legacy-restore", "ip6tables-legacy", "ip6tables-legacy-save", "ip6tables-legacy-restore",
}

// initScript is the machine's first program. The second serial port brings commands, a line each,
// and takes their output and status. Errors at boot go to the first serial port, the console.
//
// A command leaves no process and no temporary file behind.
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
# No tunnel device in each namespace.
echo 1 >/proc/sys/net/core/fb_tunnels_only_for_init_net
while read -r m; do insmod /modules/$m || echo "cannot load $m"; done </modules/order
# All namespaces share one table of neighbors.
for f in ipv4 ipv6; do for n in 1 2 3; do echo 65536 >/proc/sys/net/$f/neigh/default/gc_thresh$n; done; done
# All namespaces share one limit of ICMP errors, too.
for f in msgs_per_sec msgs_burst; do echo 1000000 >/proc/sys/net/ipv4/icmp_$f; done
touch /run/hold
if [ -x /sbin/nft ]; then unshare -n sh -c 'nft -f /hold; mount -o bind /proc/self/ns/net /run/hold'; fi
export HOME=/root
stty -F /dev/ttyS1 raw -echo
exec 3<>/dev/ttyS1
echo ` + ready + ` >&3
while IFS= read -r command <&3; do
	(eval "$command") </dev/null >&3 2>&1 3>&-
	status=$?
	kill -KILL -1
	rm -rf /tmp/*
	printf '\000status %d\n' $status >&3
done
poweroff -f
`

// hold is a ruleset of a namespace that no test uses. The kernel patches its code when the first
// hook, or the first rule that traces packets, of any namespace is added, and when the last one is
// deleted (jump labels). If both processors run at that time, qemu 7.2 sometimes leaves one in the
// patched instruction for ever: a loop that added and deleted such a rule beside TCP traffic hung
// in three of three runs, and ended after 400 rounds in two of two with this ruleset.
const hold = `table inet hold {
	chain prerouting { type filter hook prerouting priority 0; }
	chain input { type filter hook input priority 0; }
	chain forward { type filter hook forward priority 0; }
	chain output { type filter hook output priority 0; }
	chain postrouting { type filter hook postrouting priority 0; }
	chain unused { meta nftrace set 1; }
}
table netdev hold {
	chain ingress { type filter hook ingress device lo priority 0; }
}
`

// testPath returns the path in a machine of the test binary with the index.
func testPath(i int) string { return fmt.Sprintf("/test%d", i) }

// writeImage writes the initial RAM file system with the test binaries and the working directory's
// testdata.
func writeImage(w io.Writer, k *kernel, programs []string) error {
	a := newArchive(w)
	for _, d := range []string{"proc", "sys", "dev", "tmp", "run", "bin", "sbin", "etc", "root", "work", "modules", "var/lib"} {
		a.dir(d)
	}
	a.file("init", []byte(initScript))
	a.file("hold", []byte(hold))
	a.link("var/run", "/run")
	// All modules are loaded at boot.
	a.file("sbin/modprobe", []byte("#!/bin/sh\n"))

	if data, err := os.ReadFile("/etc/protocols"); err == nil {
		a.file("etc/protocols", data)
	}
	files, err := hostFiles()
	if err != nil {
		return err
	}
	for i, p := range programs {
		files[strings.TrimPrefix(testPath(i), "/")] = p
	}
	if files, err = withLibraries(files); err != nil {
		return err
	}
	for name, path := range files {
		if err := a.copy(path, name); err != nil {
			return err
		}
	}
	if err := a.tree("testdata", "work/testdata"); err != nil {
		return err
	}
	names := slices.DeleteFunc(k.matching(modules...), func(n string) bool { return unwanted[n] })
	loads, err := k.ordered(names)
	if err != nil {
		return err
	}
	var order strings.Builder
	for _, f := range loads {
		fmt.Fprintln(&order, filepath.Base(f))
		if err := a.copy(f, "modules/"+filepath.Base(f)); err != nil {
			return err
		}
	}
	a.file("modules/order", []byte(order.String()))
	return a.close()
}

// lookTool finds a tool, even in folders that are not on an ordinary user's PATH.
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

// hostFiles returns the files of programs of this system, by their names in the machine.
func hostFiles() (map[string]string, error) {
	files := map[string]string{}
	for _, name := range tools {
		if path, err := lookTool(name); err == nil {
			files["sbin/"+name] = path
		}
	}
	plugins, err := filepath.Glob("/usr/lib/*/xtables/*.so")
	if err != nil {
		return nil, err
	}
	for _, path := range plugins {
		files[strings.TrimPrefix(path, "/")] = path
	}
	if files["bin/busybox"], err = exec.LookPath("busybox"); err != nil {
		return nil, err
	}
	return files, nil
}

// loaded matches a library in the output of ldd.
var loaded = regexp.MustCompile(`(?m)^\t(?:(\S+) => )?(/\S+|not found)`)

// withLibraries adds the loader and the libraries that programs need.
func withLibraries(programs map[string]string) (map[string]string, error) {
	out, err := exec.Command("ldd", slices.Collect(maps.Values(programs))...).Output()
	// Its status is not 0 if one of the programs is linked statically.
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return nil, err
	}
	for _, m := range loaded.FindAllSubmatch(out, -1) {
		path := string(m[2])
		if path == "not found" {
			return nil, fmt.Errorf("library %s: %w", m[1], fs.ErrNotExist)
		}
		programs[strings.TrimPrefix(path, "/")] = path
	}
	return programs, nil
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

// archive writes a cpio archive in the "newc" format, which kernels unpack at boot
// (Documentation/driver-api/early-userspace/buffer-format.rst).
type archive struct {
	w    *bufio.Writer
	n    int64
	ino  int
	have map[string]bool // the names in the archive
	err  error
}

// File types (include/uapi/linux/stat.h).
const (
	modeDir, modeFile, modeLink = 0o040000, 0o100000, 0o120000
)

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), have: map[string]bool{".": true, "/": true, "": true}}
}

// entry adds an entry, after the directories that it is in. Names do not begin with a slash.
func (a *archive) entry(name string, mode int, data []byte) {
	if a.err != nil || a.have[name] {
		return
	}
	a.have[name] = true
	a.dir(path.Dir(name))
	a.ino++
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	a.write([]byte(header))
	a.write(append([]byte(name), 0))
	a.pad()
	a.write(data)
	a.pad()
}

func (a *archive) write(b []byte) {
	n, err := a.w.Write(b)
	a.n += int64(n)
	if a.err == nil {
		a.err = err
	}
}

func (a *archive) pad() {
	if rest := a.n % 4; rest != 0 {
		a.write(make([]byte, 4-rest))
	}
}

func (a *archive) dir(name string) { a.entry(name, modeDir|0o755, nil) }

// file adds a file that everybody may run.
func (a *archive) file(name string, data []byte) { a.entry(name, modeFile|0o755, data) }

func (a *archive) link(name, target string) { a.entry(name, modeLink|0o777, []byte(target)) }

// close ends the archive.
func (a *archive) close() error {
	a.ino = -1
	a.entry("TRAILER!!!", 0, nil)
	if a.err != nil {
		return a.err
	}
	return a.w.Flush()
}
