package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"
)

const (
	upstream = "k8s.io/kubernetes"
	// corednsModule is CoreDNS in the version that Kubernetes v1.37 deploys. It is built
	// outside of this module, because it needs other versions of dependencies than Kubernetes.
	corednsModule = "github.com/coredns/coredns@v1.14.6"
	// nodeproxySource is the folder of nodeproxy's sources, from the folder of this module.
	nodeproxySource = "../../nodeproxy"
)

// kubernetesVersion returns the version of Kubernetes that go.mod requires.
func kubernetesVersion() (string, error) {
	info, ok := debug.ReadBuildInfo()
	if ok {
		for _, m := range info.Deps {
			if m.Path == upstream {
				return m.Version, nil
			}
		}
	}
	return "", fmt.Errorf("cannot determine the version of Kubernetes: this program was built without module %s", upstream)
}

// programs lists the packages of a cluster's programs. Their build flags are
// those of CI's build of ../apiserver, so both use the same entries of Go's build cache.
var programs = []string{
	upstream + "/cmd/kube-apiserver",
	upstream + "/cmd/kube-proxy",
	upstream + "/cmd/kube-scheduler",
	upstream + "/cmd/kube-controller-manager",
	upstream + "/cmd/kubectl",
	upstream + "/cmd/kubelet",
	upstream + "/test/images/agnhost",
	upstream + "/test/images/regression-issue-74839",
	"github.com/onsi/ginkgo/v2/ginkgo",
	"go.etcd.io/etcd/server/v3", // of the client that Kubernetes requires
}

// cniPlugins is the folder of the programs of Debian's package containernetworking-plugins.
const cniPlugins = "/usr/lib/cni"

// check returns an error that names the programs that the machine lacks.
func check() error {
	var lacks []string
	for _, name := range []string{"conntrack", "containerd", "debootstrap", "ip", "iptables", "nft", "runc", cniPlugins + "/ptp"} {
		if _, err := exec.LookPath(name); err != nil {
			lacks = append(lacks, name)
		}
	}
	if len(lacks) == 0 {
		return nil
	}
	return fmt.Errorf("this machine lacks %v (apt-get install conntrack containerd debootstrap iproute2 iptables nftables runc containernetworking-plugins)", lacks)
}

// build builds the programs and images unless the cache folder has them, and returns the settings
// of a cluster that uses them.
func build(ctx context.Context, o options) (settings, error) {
	version, err := kubernetesVersion()
	s := settings{Dir: o.dir, Version: version, Nodes: o.nodes}
	if err = errors.Join(err, check()); err != nil {
		return s, err
	}
	fmt.Printf("Kubernetes %s in %s\n", s.Version, o.dir)
	if _, err := os.Stat(s.imageArchive()); err == nil {
		return s, nil // it is the last
	}
	fmt.Println("building the programs")
	minor := strings.Split(s.Version, ".")[1]
	ldflags := fmt.Sprintf("-ldflags=-s -w -X k8s.io/component-base/version.gitVersion=%s -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=%s", s.Version, minor)
	for _, args := range [][]string{
		append([]string{"install", ldflags}, programs...),
		{"test", "-c", "-vet=off", ldflags, "-o", s.bin("e2e.test"), upstream + "/test/e2e"},
		{"install", "-ldflags=-s -w", corednsModule},
	} {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOBIN="+s.bin())
		if _, err := run(cmd); err != nil {
			return s, err
		}
	}
	// Go names it after the last part of its path.
	return s, errors.Join(os.Rename(s.bin("server"), s.bin("etcd")), s.makeImages(ctx))
}

// buildNodeproxy builds nodeproxy from the tree that holds this module. It always runs the
// go command, which checks whether the sources changed.
func (s settings) buildNodeproxy(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-o", s.bin("nodeproxy"), ".")
	cmd.Dir = nodeproxySource
	// In the workspace, so with this tree's library, and for any C library.
	cmd.Env = append(os.Environ(), "GOWORK=", "CGO_ENABLED=0")
	_, err := run(cmd)
	return err
}

// output runs a command and returns its output without white space around it.
func output(ctx context.Context, args ...string) (string, error) {
	return run(exec.CommandContext(ctx, args[0], args[1:]...))
}

// run is output of a command that was made before.
func run(cmd *exec.Cmd) (string, error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return string(bytes.TrimSpace(out)), err
}
