//go:build linux

package wholeagent

import (
	"bytes"
	"cmp"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"sigs.k8s.io/yaml"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/tuning"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// readObjects decodes the Kubernetes objects of a file, and rejects unknown fields.
func readObjects(t *testing.T, file string) []runtime.Object {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1.AddToScheme, apps.AddToScheme, rbac.AddToScheme} {
		must.Do(t, add(s))
	}
	text := must.Get(os.ReadFile(filepath.Join("../../deploy", file)))(t)
	var out []runtime.Object
	d := serializer.NewCodecFactory(s, serializer.EnableStrict).UniversalDeserializer()
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		o, _, err := d.Decode([]byte(doc), nil, nil)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		out = append(out, o)
	}
	return out
}

// daemonSet returns the DaemonSet of the folder base.
func daemonSet(t *testing.T) *apps.DaemonSet {
	t.Helper()
	for _, o := range readObjects(t, "base/daemonset.yaml") {
		if ds, ok := o.(*apps.DaemonSet); ok {
			return ds
		}
	}
	t.Fatal("no DaemonSet")
	return nil
}

// parameters is the part of a configuration that determines which kernel parameters are set.
type parameters struct {
	mode                          string
	tuning                        []tuning.Setting
	localhostNodePorts, strictARP bool
}

func parametersOf(c *config.Config) parameters {
	return parameters{c.Mode, tuning.Settings(c.Effective.Conntrack, 1), c.ServesLoopback(), c.Effective.IPVS.StrictARP}
}

// argumentsOf returns the arguments of a container with another configuration file.
func argumentsOf(c *v1.Container, file string) (out []string) {
	for _, a := range c.Args {
		out = append(out, strings.NewReplacer("/etc/nodeproxy/config.yaml", file, "$(NODE_NAME)", "n1").Replace(a))
	}
	return out
}

// TestDaemonSetMatchesTheProgram parses the arguments and the configuration of the manifests
// as the program does, with each mode.
func TestDaemonSetMatchesTheProgram(t *testing.T) {
	t.Parallel()
	text := must.Get(os.ReadFile("../../deploy/base/config.yaml"))(t)
	file := filepath.Join(t.TempDir(), "config.yaml")
	ds := daemonSet(t)
	spec := ds.Spec.Template.Spec
	for _, mode := range []string{"nftables", "iptables", "ipvs"} {
		must.Do(t, os.WriteFile(file, []byte(strings.Replace(string(text), "mode: nftables", "mode: "+mode, 1)), 0o644))
		var all []parameters
		for _, c := range append(spec.InitContainers, spec.Containers...) {
			got := configtest.Parsed(t, argumentsOf(&c, file))
			all = append(all, parametersOf(got))
			if got.Effective.Logging.Format != "json" || got.InitOnly != (c.Name == "parameters") {
				t.Errorf("%s: logging %s, init-only %v", c.Name, got.Effective.Logging.Format, got.InitOnly)
			}
			// A container has a read-only /proc/sys unless it is privileged.
			s := c.SecurityContext
			if privileged := s.Privileged != nil && *s.Privileged; privileged != got.InitOnly {
				t.Errorf("%s: privileged is %v", c.Name, privileged)
			}
			if p := c.LivenessProbe; p != nil && p.HTTPGet.Host+":"+p.HTTPGet.Port.String() != got.ReadyzBindAddress {
				t.Errorf("%s: probed at port %v, serves at %s", c.Name, p.HTTPGet.Port.String(), got.ReadyzBindAddress)
			}
			if c.ImagePullPolicy != v1.PullIfNotPresent {
				t.Errorf("%s: an image that was loaded into the node is not used: policy %q", c.Name, c.ImagePullPolicy)
			}
		}
		// The init container must set the parameters that the other one needs.
		if len(all) != 2 || !reflect.DeepEqual(all[0], all[1]) || all[0].mode != mode || mode == "iptables" && !all[0].localhostNodePorts {
			t.Errorf("mode %s: the containers' parameters are %+v", mode, all)
		}
	}
	// What operators' tools expect of kube-proxy's pods.
	labels, selector, c := ds.Spec.Template.Labels, ds.Spec.Selector.MatchLabels, spec.Containers[0]
	if labels["k8s-app"] != "kube-proxy" {
		t.Errorf("kube-prometheus does not select pods with the labels %v", labels)
	}
	if selector["k8s-app"] != "" {
		t.Error("the DaemonSet kube-proxy would have the same selector")
	}
	for name, value := range selector {
		if labels[name] != value {
			t.Errorf("the pods have no label %s=%s", name, value)
		}
	}
	if p := c.ReadinessProbe; p == nil || p.HTTPGet.Path != "/readyz" || p.HTTPGet.Port != c.LivenessProbe.HTTPGet.Port || p.HTTPGet.Host != "127.0.0.1" {
		t.Errorf("the readiness probe is %v", p)
	}
	// Without it each start logs that the OOM score cannot be set.
	if !slices.Contains(c.SecurityContext.Capabilities.Add, "SYS_RESOURCE") {
		t.Errorf("without SYS_RESOURCE: %v", c.SecurityContext.Capabilities.Add)
	}
	if spec.ServiceAccountName != "nodeproxy" || !spec.HostNetwork {
		t.Errorf("service account %q, host network %v", spec.ServiceAccountName, spec.HostNetwork)
	}
}

// TestSocketLBPatchMountsWhatTheAgentOpens applies the patch as kubectl does.
func TestSocketLBPatchMountsWhatTheAgentOpens(t *testing.T) {
	t.Parallel()
	text := must.Get(os.ReadFile("../../deploy/socket-lb-patch.yaml"))(t)
	patch := must.Get(yaml.YAMLToJSON(text))(t)
	before := daemonSet(t)
	original := must.Get(json.Marshal(before))(t)
	merged := must.Get(strategicpatch.StrategicMergePatch(original, patch, &apps.DaemonSet{}))(t)
	after := &apps.DaemonSet{}
	d := json.NewDecoder(bytes.NewReader(merged))
	d.DisallowUnknownFields()
	must.Do(t, d.Decode(after))
	spec, was := after.Spec.Template.Spec, before.Spec.Template.Spec
	if len(spec.Containers) != 1 || len(spec.InitContainers) != 1 {
		t.Fatalf("%d containers, %d init containers", len(spec.Containers), len(spec.InitContainers))
	}
	c, old := spec.Containers[0], was.Containers[0]
	for _, a := range old.Args {
		if !slices.Contains(c.Args, a) {
			t.Errorf("the patch loses the argument %s", a)
		}
	}
	for _, a := range append(old.SecurityContext.Capabilities.Add, "BPF", "PERFMON") {
		if !slices.Contains(c.SecurityContext.Capabilities.Add, a) {
			t.Errorf("without the capability %s", a)
		}
	}
	if len(c.VolumeMounts) != len(old.VolumeMounts)+2 || len(spec.Volumes) != len(was.Volumes)+2 {
		t.Errorf("mounts %v, volumes %v", c.VolumeMounts, spec.Volumes)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	must.Do(t, os.WriteFile(file, []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n"), 0o644))
	got := configtest.Parsed(t, argumentsOf(&c, file)).SocketLB
	if !got.Enabled {
		t.Error("without --socket-lb")
	}
	// hostOf returns the folder of the host that is mounted at a folder of the container, and
	// whether it is writable.
	hostOf := func(folder string) (string, bool) {
		for _, m := range c.VolumeMounts {
			rest, ok := strings.CutPrefix(folder, m.MountPath)
			for _, v := range spec.Volumes {
				if ok && v.Name == m.Name && v.HostPath != nil {
					return v.HostPath.Path + rest, !m.ReadOnly
				}
			}
		}
		return "", false
	}
	if host, _ := hostOf(got.Cgroup); host != "/sys/fs/cgroup" {
		t.Errorf("the cgroup %s is %q of the host", got.Cgroup, host)
	}
	dir := cmp.Or(got.Dir, socketlb.DefaultDir)
	if host, writable := hostOf(dir); host != socketlb.DefaultDir || !writable {
		t.Errorf("the folder %s is %q of the host, writable %v", dir, host, writable)
	}
}

// TestSystemdAcceptsTheUnit runs systemd-analyze verify.
func TestSystemdAcceptsTheUnit(t *testing.T) {
	t.Parallel()
	analyze, err := exec.LookPath("systemd-analyze")
	netlab.Need(t, err == nil, "systemd-analyze (package systemd)")
	text := must.Get(os.ReadFile("../../deploy/nodeproxy.service"))(t)
	dir := t.TempDir()
	verify := func(text string) (string, error) {
		t.Helper()
		// The program must exist.
		put(t, dir, "nodeproxy.service", strings.ReplaceAll(text, "/usr/local/bin/nodeproxy", testBinary(t)))
		cmd := exec.Command(analyze, "verify", "--man=no", "--recursive-errors=no", filepath.Join(dir, "nodeproxy.service"))
		cmd.Env = append(os.Environ(), "LC_ALL=C")
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := verify(string(text)); err != nil || out != "" {
		t.Errorf("%v\n%s", err, out)
	}
	// systemd-analyze reports an unknown directive.
	if out, err := verify(strings.Replace(string(text), "ProtectHome=", "ProtectsHome=", 1)); err == nil && out == "" {
		t.Error("systemd accepts an unknown directive")
	}
}

// TestContainerfileBuildsTheProgram has go print the commands of the Containerfile's build, whose result the image
// must run.
func TestContainerfileBuildsTheProgram(t *testing.T) {
	t.Parallel()
	text := string(must.Get(os.ReadFile("../../deploy/Containerfile"))(t))
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(must.Get(os.ReadFile("../../../go.mod"))(t))
	contains(t, text, "golang:"+string(version[1])+" AS build\n", "-o /nodeproxy ", "\nCOPY --from=build /nodeproxy /usr/local/bin/nodeproxy\n", " iptables ",
		"\nRUN ln -s nodeproxy /usr/local/bin/kube-proxy\n", "\nENTRYPOINT [\"/usr/local/bin/nodeproxy\"]\nCMD [\"run\"]\n")
	build := regexp.MustCompile(`(?m)^RUN (.*)go build (.*)$`).FindStringSubmatch(text)
	_, err := exec.LookPath("go")
	netlab.Need(t, err == nil, "go")
	cmd := exec.Command("sh", "-c", build[1]+"go build -n "+build[2])
	cmd.Dir = "../../../.."
	// The repository may belong to another user.
	cmd.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false")
	must.Get(cmd.CombinedOutput())(t)
}
