package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const containerdSocket = "/run/containerd/containerd.sock"

// nodeScript names a node, $0, and mounts folders of its own, below $1, for the files of kubelet and
// containerd. A node has files in place of the kernel parameters of the whole machine that kubelet sets, with
// kubelet's values, so kubelet leaves the machine's parameters alone. In the end it shares mounts within the
// node, for volumes with mount propagation.
const nodeScript = `hostname "$0"
mkdir -p "$1/cni" "$1/lib" "$1/log"
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mount --bind "$1/lib" /var/lib
mount --bind "$1/log" /var/log
while read -r name value; do
	echo "$value" >"$1/${name##*/}"
	mount --bind "$1/${name##*/}" "/proc/sys/$name"
done <<END
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
END
mount --make-rshared /`

// node runs as process 1 of a node.
func node(folder, number string) error {
	s, err := running(folder)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	dir := func(name ...string) string { return s.state(append([]string{nodeName(n)}, name...)...) }
	if _, err := output(context.Background(), "sh", "-ec", nodeScript, nodeName(n), dir()); err != nil {
		return err
	}
	if _, err := io.ReadAll(os.Stdin); err != nil { // ends when the node is connected
		return err
	}
	if err := errors.Join(
		nodeNetwork(n, s.Nodes),
		os.WriteFile(dir("cni", "10-pods.conflist"), []byte(cniConfig(n)), 0o644),
		os.WriteFile(dir("containerd.toml"), []byte(containerdConfig(dir("cni"))), 0o644),
		os.WriteFile(dir("kubelet.yaml"), []byte(s.kubeletConfig(n)), 0o644),
		os.WriteFile(dir("resolv.conf"), []byte("nameserver "+controlIP+"\n"), 0o644),
	); err != nil {
		return err
	}
	containerd := exec.Command("containerd", "--config", dir("containerd.toml"))
	kubelet := exec.Command(s.bin("kubelet"), "--config", dir("kubelet.yaml"), "--kubeconfig", s.state(nodeName(n)+".conf"),
		"--hostname-override", nodeName(n), "--node-ip", nodeIP(n)+","+nodeIP6(n))
	if err := s.launch(nodeName(n)+"-containerd", containerd); err != nil {
		return err
	}
	if err := s.importImages(); err != nil {
		return err
	}
	if err := s.launch(nodeName(n)+"-kubelet", kubelet); err != nil {
		return err
	}
	// Process 1 must also reap processes that lost their parents, such as containerd's
	// shims. From here on no other code waits for a command.
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		if err != nil && err != unix.EINTR {
			return os.NewSyscallError("wait4", err)
		}
		for _, cmd := range []*exec.Cmd{containerd, kubelet} {
			if pid == cmd.Process.Pid {
				return fmt.Errorf("%s ended: exit status %d, signal %d", cmd.Path, status.ExitStatus(), status.Signal())
			}
		}
	}
}

// importImages waits until containerd answers and imports the images.
func (s settings) importImages() error {
	for start := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		_, err := output(context.Background(), "ctr", "--address", containerdSocket, "--namespace", "k8s.io", "images", "import", s.imageArchive())
		if err == nil || time.Since(start) > startTimeout {
			return err
		}
	}
}

// containerdConfig returns containerd's configuration file, in the version that containerd
// 1.3 to 2 understand. It works without the right to lower an OOM score (CAP_SYS_RESOURCE).
func containerdConfig(cni string) string {
	return fmt.Sprintf(`version = 2

[grpc]
  address = %q

[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  disable_apparmor = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = %q
    conf_dir = %q

  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
`, containerdSocket, pauseImage(), cniPlugins, cni)
}

// kubeletConfig returns kubelet's configuration file. Kubelet accepts either version of
// control groups, does not limit pods as a whole, and ignores how full the machine's disk
// is.
func (s settings) kubeletConfig(n int) string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: %s/%s
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix://%s
clusterDomain: %s
clusterDNS: [%s]
resolvConf: %s
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%%, imagefs.available: 1%%}
kubeAPIQPS: 100
kubeAPIBurst: 200
`, cgroup, nodeName(n), containerdSocket, clusterDomain, dnsServiceIP, s.state(nodeName(n), "resolv.conf"))
}
