package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// machinePrograms lists the programs that "up --kernel" needs besides needed.
var machinePrograms = []program{
	{"busybox", "busybox-static"},
	{"mke2fs", "e2fsprogs"},
	{"qemu-system-x86_64", "qemu-system-x86"},
}

// machineModules are the modules that machineScript needs. The kernel loads others on demand.
var machineModules = []string{"virtio_pci", "virtio_net", "virtio_blk", "9pnet_virtio", "9p", "overlay", "crc32c_generic", "ext4"}

// machineScript is the first program of a machine. The machine's root is the host's, with a RAM
// file system for changes. The cache folder is the host's, and both write to it.
const machineScript = `#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
while read -r m; do insmod /modules/$m || echo "cannot load $m"; done </modules/order
mkdir /lower /changes /new
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root /lower
mount -t tmpfs changes /changes
mkdir /changes/upper /changes/work
mount -t overlay -o lowerdir=/lower,upperdir=/changes/upper,workdir=/changes/work root /new
mount -t proc proc /new/proc
mount -t sysfs sysfs /new/sys
mount -t cgroup2 cgroup2 /new/sys/fs/cgroup
mount -t bpf bpf /new/sys/fs/bpf
mount -t devtmpfs dev /new/dev
mkdir -p /new/dev/pts /new/dev/shm /new/lib/modules
mount -t devpts devpts /new/dev/pts
for d in dev/shm tmp run; do mount -t tmpfs tmp /new/$d; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=mmap cache /new` + cacheInside + `
. /environment
mount --bind /lower$MODULES /new/lib/modules
cp /bin/busybox /new/usr/sbin/modprobe
for c in $(cat /new/sys/fs/cgroup/cgroup.controllers); do echo +$c >/new/sys/fs/cgroup/cgroup.subtree_control; done
cp /settings /new/run/settings
exec switch_root -c /dev/console /new $PROGRAM /run/settings
`

// startMachine starts a machine with another kernel, which qemu emulates, and in which the nodes
// run. Node n has interface n of the machine and disk n; interface 0 is the machine's own.
func (p *plane) startMachine(ctx context.Context) error {
	program := p.state(rolePrefix + "machine")
	if err := copyFile(program, "/proc/self/exe", 0o755); err != nil {
		return err
	}
	kernel, image, err := p.machineImage(ctx, program)
	if err != nil {
		return err
	}
	disk, err := p.disk(ctx)
	if err != nil {
		return err
	}
	args := []string{
		"-accel", "tcg,thread=multi,tb-size=1024", "-smp", strconv.Itoa(runtime.NumCPU()), "-m", strconv.Itoa(4096 + 2048*p.Nodes),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "file:" + p.log("machine.log"),
		"-kernel", kernel, "-initrd", image,
		// With mitigations, each system call discards the emulator's address translations.
		"-append", "console=ttyS0 panic=-1 loglevel=5 no_timer_check mitigations=off " + frequency(),
	}
	for tag, path := range map[string]string{"root": "/,readonly=on", "cache": cacheInside} {
		args = append(args, "-fsdev", "local,security_model=none,multidevs=remap,id="+tag+",path="+path,
			"-device", "virtio-9p-pci,fsdev="+tag+",mount_tag="+tag)
	}
	for n := 0; n <= p.Nodes; n++ {
		name := nodeName(n)
		if err := ip("tuntap add %s mode tap", name); err != nil {
			return err
		}
		if err := p.attach(n); err != nil {
			return err
		}
		args = append(args, "-netdev", "tap,script=no,downscript=no,id="+name+",ifname="+name, "-device", "virtio-net-pci,netdev="+name+",mac="+nodeMAC(n))
		if n == 0 {
			continue
		}
		if err := os.Mkdir(p.state(name), 0o755); err != nil {
			return err
		}
		file := p.state(name, "disk")
		if _, err := output(ctx, "cp", "--sparse=always", disk, file); err != nil {
			return err
		}
		args = append(args, "-drive", "if=none,format=raw,cache=unsafe,id=disk-"+name+",file="+file,
			"-device", "virtio-blk-pci,drive=disk-"+name+",serial="+name)
	}
	path, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		return err
	}
	log, err := os.Create(p.log("qemu.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	return p.watch("machine", &exec.Cmd{Path: path, Args: append([]string{"qemu"}, args...), Stdout: log, Stderr: log, Dir: "/"})
}

// frequency returns kernel parameters for the machine's clock, which is the host's time stamp
// counter. If the host is itself a virtual machine, it lists the counter's frequency; a kernel
// that measures the frequency on a busy host is wrong.
func frequency() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	m := regexp.MustCompile(`(?m)^cpu MHz\s*: (\d+)\.(\d{3})$`).FindSubmatch(b)
	if m == nil || !regexp.MustCompile(`(?m)^flags\s*:.* hypervisor\b`).Match(b) {
		return ""
	}
	return fmt.Sprintf("tsc=reliable tsc_early_khz=%s%s", m[1], m[2])
}

// machineImage writes the initial RAM file system of a machine that runs program. It returns the
// kernel and the image.
func (p *plane) machineImage(ctx context.Context, program string) (kernel, image string, err error) {
	kernels, err := filepath.Glob(filepath.Join(p.Kernel, "boot", "vmlinuz-*"))
	if err != nil {
		return "", "", err
	}
	if len(kernels) == 0 {
		return "", "", fmt.Errorf("no kernel in %s/boot", p.Kernel)
	}
	kernel = kernels[len(kernels)-1]
	release := strings.TrimPrefix(filepath.Base(kernel), "vmlinuz-")
	modules := filepath.Join(p.Kernel, "lib", "modules", release)
	if _, err := output(ctx, "busybox", "depmod", "-b", p.Kernel, release); err != nil {
		return "", "", err
	}
	dependencies, err := os.ReadFile(filepath.Join(modules, "modules.dep"))
	if err != nil {
		return "", "", err
	}
	order, err := loadOrder(string(dependencies), machineModules)
	if err != nil {
		return "", "", fmt.Errorf("%s: %w", modules, err)
	}
	dir, image := p.state("image"), p.state("image.cpio")
	for _, d := range []string{"bin", "proc", "dev", "modules"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return "", "", err
		}
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return "", "", err
	}
	files := map[string]string{"bin/busybox": busybox}
	var names strings.Builder
	for _, m := range order {
		files["modules/"+filepath.Base(m)] = filepath.Join(modules, m)
		fmt.Fprintln(&names, filepath.Base(m))
	}
	for to, from := range files {
		if err := copyFile(filepath.Join(dir, to), from, 0o755); err != nil {
			return "", "", err
		}
	}
	for name, content := range map[string]string{
		"init": machineScript, "settings": p.json(), "modules/order": names.String(),
		"environment": fmt.Sprintf("MODULES=%s\nPROGRAM=%s\n", filepath.Dir(modules), program),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			return "", "", err
		}
	}
	_, err = output(ctx, "sh", "-c", `cd "$1" && find . | busybox cpio -o -H newc >"$2"`, "sh", dir, image)
	return kernel, image, err
}

// loadOrder returns the files of modules and of the modules that they need, in an order in which
// they can be loaded. dependencies is a modules.dep.
func loadOrder(dependencies string, modules []string) ([]string, error) {
	needs := map[string][]string{} // by file
	files := map[string]string{}   // by name
	for line := range strings.Lines(dependencies) {
		file, list, _ := strings.Cut(strings.TrimSpace(line), ":")
		needs[file] = strings.Fields(list)
		files[strings.TrimSuffix(filepath.Base(file), ".ko")] = file
	}
	var order []string
	var add func(string)
	add = func(file string) {
		if slices.Contains(order, file) {
			return
		}
		for _, n := range needs[file] {
			add(n)
		}
		order = append(order, file)
	}
	for _, m := range modules {
		if files[m] == "" {
			return nil, fmt.Errorf("no module %s; a folder of an earlier .ci/vm-kernel lacks it", m)
		}
		add(files[m])
	}
	return order, nil
}

// disk makes a file system for a node's /var/lib, with the images imported. It does so outside
// of the machine, where an import takes minutes.
func (p *plane) disk(ctx context.Context) (string, error) {
	config, socket, file := p.state("import.toml"), p.state("import.sock"), p.state("disk")
	if err := os.WriteFile(config, []byte(containerdConfig("")), 0o644); err != nil {
		return "", err
	}
	log, err := os.Create(p.log("import.log"))
	if err != nil {
		return "", err
	}
	defer log.Close()
	cmd := exec.CommandContext(ctx, "containerd", "--config", config, "--address", socket,
		"--root", p.state("lib", "containerd"), "--state", p.state("import"))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return "", err
	}
	err = p.importImages(socket)
	cmd.Process.Signal(unix.SIGTERM)
	err = errors.Join(err, cmd.Wait())
	if err != nil {
		return "", fmt.Errorf("import of images (see %s): %w", log.Name(), err)
	}
	_, err = output(ctx, "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-d", p.state("lib"), file, "8G")
	return file, err
}

// hold is a ruleset of the machine's own network namespace. The kernel patches its code when the
// first namespace adds a hook and when the last one deletes it, and qemu 7.2 sometimes hangs then.
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

// machine is the role of a machine's process 1. It starts the nodes and serves role remote.
func machine() error {
	b, err := os.ReadFile(os.Args[1])
	if err != nil {
		return err
	}
	s, err := parseSettings(string(b))
	if err != nil {
		return err
	}
	for _, e := range s.environment() {
		name, value, _ := strings.Cut(e, "=")
		os.Setenv(name, value)
	}
	// A mount namespace of the machine's own: role node makes its copy shared.
	if err := mountAll([]mount{{target: "/", flags: unix.MS_REC | unix.MS_PRIVATE}}); err != nil {
		return err
	}
	own, err := machineInterface(0)
	if err != nil {
		return err
	}
	for _, c := range []string{"link set lo up", "addr add " + machineIP + "/24 dev " + own, "link set " + own + " up"} {
		if err := ip("%s", c); err != nil {
			return err
		}
	}
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(hold)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(machineIP, remotePort))
	if err != nil {
		return err
	}
	p := &plane{settings: s, machine: true, ended: make(chan error, 1)}
	pids := map[string]int{}
	for n := 1; n <= p.Nodes; n++ {
		name := nodeName(n)
		disk, err := machineDisk(n)
		if err != nil {
			return err
		}
		// Covers the folder that the host has, because containers need other file systems than 9P.
		if err := mountAll([]mount{{source: "tmpfs", target: p.state(name), fstype: "tmpfs"}}); err != nil {
			return err
		}
		if err := os.Mkdir(p.state(name, "lib"), 0o755); err != nil {
			return err
		}
		if err := mountAll([]mount{{source: disk, target: p.state(name, "lib"), fstype: "ext4"}}); err != nil {
			return err
		}
		if pids[name], err = p.startNode(n); err != nil {
			return err
		}
	}
	go func() { p.ended <- serveRemote(listener, pids) }()
	return <-p.ended
}

func nodeMAC(n int) string { return fmt.Sprintf("52:54:00:00:00:%02x", n) }

// machineInterface returns the machine's interface n.
func machineInterface(n int) (string, error) {
	return deviceWith("/sys/class/net/*/address", nodeMAC(n))
}

// machineDisk returns the device of the machine's disk n.
func machineDisk(n int) (string, error) {
	name, err := deviceWith("/sys/block/*/serial", nodeName(n))
	return filepath.Join("/dev", name), err
}

// deviceWith returns the name of the device in whose folder the file has the content.
func deviceWith(files, content string) (string, error) {
	paths, err := filepath.Glob(files)
	if err != nil {
		return "", err
	}
	for _, path := range paths {
		if b, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(b)) == content {
			return filepath.Base(filepath.Dir(path)), nil
		}
	}
	return "", fmt.Errorf("no %s holds %q", files, content)
}
