package deploy

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// objects holds objects by kind and name.
type objects map[string]map[string]any

// add adds an object in the form that both tools have in common: without the hashes by which they
// roll out a changed configuration.
func (o objects) add(t *testing.T, text []byte) {
	t.Helper()
	var object map[string]any
	if err := yaml.UnmarshalStrict(text, &object); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if object == nil {
		return
	}
	normal := get(yaml.Marshal(object))(t)
	normal = regexp.MustCompile(`name: (nodeproxy|nodeproxy-dashboard)-[0-9a-z]{10}\n`).ReplaceAll(normal, []byte("name: $1\n"))
	normal = regexp.MustCompile(`      annotations:\n        checksum/config: [0-9a-f]{64}\n`).ReplaceAll(normal, nil)
	object = nil
	do(t, yaml.Unmarshal(normal, &object))
	if data, ok := object["data"].(map[string]any); ok && data["config.yaml"] != nil {
		var config map[string]any
		do(t, yaml.UnmarshalStrict([]byte(data["config.yaml"].(string)), &config))
		data["config.yaml"] = config
	}
	meta := object["metadata"].(map[string]any)
	id := fmt.Sprintf("%v %v", object["kind"], meta["name"])
	if o[id] != nil {
		t.Fatalf("two objects %s", id)
	}
	o[id] = object
}

// kustomized builds a folder.
func kustomized(t *testing.T, path string) objects {
	t.Helper()
	documents := get(Kustomized(path))(t)
	out := objects{}
	for _, text := range documents {
		out.add(t, []byte(text))
	}
	return out
}

// rendered renders the chart with values, as YAML, in a namespace.
func rendered(t *testing.T, namespace, values string) (objects, error) {
	t.Helper()
	documents, err := Rendered(namespace, values)
	if err != nil {
		return nil, err
	}
	out := objects{}
	for _, text := range documents {
		out.add(t, []byte(text))
	}
	return out, nil
}

// TestChartAndOverlaysAgree renders the chart as each overlay, and compares all objects with what
// kustomize builds.
func TestChartAndOverlaysAgree(t *testing.T) {
	component := filepath.Join(t.TempDir(), "with-component")
	for path, values := range map[string]string{
		"base":                "{apiServer: {host: api.cluster.example}, config: {clusterCIDR: 10.244.0.0/16}}",
		"overlays/kubeadm":    "{kubeadm: true}",
		"overlays/calico":     "{kubeadm: true, args: [--kube-proxy-table=always]}",
		"overlays/prometheus": "{apiServer: {host: api.cluster.example}, config: {clusterCIDR: 10.244.0.0/16}, monitoring: {enabled: true}}",
		component:             "{apiServer: {host: api.cluster.example}, config: {clusterCIDR: 10.244.0.0/16}, startupTaint: {enabled: true}}",
	} {
		t.Run(filepath.Base(path), func(t *testing.T) {
			at := filepath.Join(folder, path)
			if path == component {
				at = withComponent(t, component, "base")
			}
			want := kustomized(t, at)
			got := get(rendered(t, "kube-system", values))(t)
			if a, b := slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)); !slices.Equal(a, b) {
				t.Fatalf("the chart has\n%q, kustomize\n%q", a, b)
			}
			for id := range want {
				if !reflect.DeepEqual(got[id], want[id]) {
					g, _ := yaml.Marshal(got[id])
					w, _ := yaml.Marshal(want[id])
					t.Errorf("%s differs: the chart has\n%s\nkustomize\n%s", id, g, w)
				}
			}
		})
	}
}

// TestOldestKubectlBuildsTheSame builds the base and each overlay, with the component startup-taint and without it, by
// the program of the module oldest.
func TestOldestKubectlBuildsTheSame(t *testing.T) {
	overlays, err := filepath.Glob(filepath.Join(folder, "overlays", "*"))
	if err != nil || len(overlays) != 3 {
		t.Fatalf("overlays %q, error %v", overlays, err)
	}
	for _, path := range append(overlays, filepath.Join(folder, "base"), withComponent(t, filepath.Join(t.TempDir(), "with-component"), "base")) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			absolute := get(filepath.Abs(path))(t)
			program := exec.Command("go", "run", ".", absolute)
			program.Dir, program.Env = "oldest", append(os.Environ(), "GOWORK=off")
			text, err := program.Output()
			if e := (*exec.ExitError)(nil); errors.As(err, &e) {
				t.Fatalf("%v\n%s", err, e.Stderr)
			} else if err != nil {
				t.Fatal(err)
			}
			got := objects{}
			for document := range strings.SplitSeq(string(text), "---\n") {
				got.add(t, []byte(document))
			}
			if want := kustomized(t, path); !reflect.DeepEqual(got, want) {
				t.Errorf("the oldest kubectl builds\n%v\nthe newest\n%v", got, want)
			}
		})
	}
}

// withComponent writes a folder whose kustomization adds the component startup-taint to the base or an overlay.
func withComponent(t *testing.T, dir, to string) string {
	t.Helper()
	do(t, os.Mkdir(dir, 0o755))
	dir = get(filepath.EvalSymlinks(dir))(t)
	rel := get(filepath.Rel(dir, get(filepath.Abs(folder))(t)))(t)
	text := "resources: [" + filepath.Join(rel, to) + "]\ncomponents: [" + filepath.Join(rel, "components/startup-taint") + "]\n"
	do(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644))
	return dir
}

// TestValuesHaveAnEffect sets each value of the chart that the overlays do not.
func TestValuesHaveAnEffect(t *testing.T) {
	for values, want := range map[string]string{
		"{config: {clusterCIDR: 10.1.0.0/16}}":                          "apiServer.host is required",
		"{apiServer: {host: api}}":                                      "config.clusterCIDR is required",
		"{apiServer: {host: api}, config: {detectLocalMode: NodeCIDR}}": "",
		"{kubeadm: true}":                                               "",
		"{kubeadm: true, mode: nftabels}":                               "mode",
		"{kubeadm: true, config: {mode: nftabels}}":                     "mode",
		"{kubeadm: true, config: {clusterCIRD: 10/8}}":                  "clusterCIRD",
		"{kubeadm: true, tolerations: {}}":                              "tolerations",
		"{kubeadm: true, nodeselector: {}}":                             "nodeselector",
		"{kubeadm: true, image: {name: x}}":                             "name",
		"{kubeadm: yes please}":                                         "kubeadm",
	} {
		if _, err := rendered(t, "kube-system", values); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", values, err, want)
		}
	}
	got, err := rendered(t, "other", `
apiServer: {host: 192.0.2.1, port: 443}
image: {repository: registry.example/nodeproxy, tag: v9, pullPolicy: Always}
mode: ipvs
config: {clusterCIDR: 10.1.0.0/16, conntrack: {maxPerCore: 0}, mode: iptables}
args: [--allow-annotations=weights]
resources: {limits: {memory: 1Gi}}
capabilities: [NET_ADMIN, NET_RAW]
imagePullSecrets: [{name: registry}]
nodeSelector: {pool: edge}
tolerations: [{key: pool, value: edge}]
startupTaint: {enabled: true}
`)
	if err != nil {
		t.Fatal(err)
	}
	text := func(id string) string {
		if got[id] == nil {
			t.Fatalf("no %s among %q", id, slices.Sorted(maps.Keys(got)))
		}
		b := get(yaml.Marshal(got[id]))(t)
		return string(b)
	}
	for id, wants := range map[string][]string{
		"ConfigMap nodeproxy": {"clusterCIDR: 10.1.0.0/16", "maxPerCore: 0", "mode: iptables", "format: json", "namespace: other"},
		"DaemonSet nodeproxy": {
			"image: registry.example/nodeproxy:v9", "imagePullPolicy: Always", "value: 192.0.2.1", `value: "443"`, "- --allow-annotations=weights",
			"memory: 1Gi", "namespace: other", "- NET_RAW\n            drop", "imagePullSecrets:\n      - name: registry", "kubernetes.io/os: linux\n        pool: edge",
			"tolerations:\n      - key: pool\n        value: edge\n      volumes",
		},
		"ClusterRoleBinding nodeproxy":                             {"namespace: other"},
		"ClusterRoleBinding nodeproxy-startup-taint":               {"namespace: other"},
		"ValidatingAdmissionPolicy nodeproxy-startup-taint":        {"system:serviceaccount:other:nodeproxy"},
		"ValidatingAdmissionPolicyBinding nodeproxy-startup-taint": {"policyName: nodeproxy-startup-taint"},
	} {
		for _, want := range wants {
			if !strings.Contains(text(id), want) {
				t.Errorf("%s lacks %q:\n%s", id, want, text(id))
			}
		}
	}
	if n := strings.Count(text("DaemonSet nodeproxy"), "registry.example/nodeproxy:v9"); n != 2 {
		t.Errorf("%d containers have the image", n)
	}
}

// TestPortsFollowTheAddresses renders the chart with addresses of /healthz and of the metrics, with the
// configuration in the chart and in kubeadm's ConfigMap. The probes have a port of their own.
func TestPortsFollowTheAddresses(t *testing.T) {
	for _, kubeadm := range []bool{false, true} {
		for address, want := range map[string]int32{
			"": 10256, "0.0.0.0:1": 1, "0.0.0.0": 10256, "::": 10256, "[::]:65535": 65535, "127.0.0.1:10257": 10257,
			"192.0.2.1:10256": 10256, "192.0.2.1": 10256, "2001:db8::1": 10256, "[2001:db8::1]:102560": 102560,
		} {
			got := get(rendered(t, "kube-system", fmt.Sprintf("{kubeadm: %v, apiServer: {host: api}, config: {clusterCIDR: 10.1.0.0/16, healthzBindAddress: %q, metricsBindAddress: '0.0.0.0:9'}}", kubeadm, address)))(t)
			var d apps.DaemonSet
			var s v1.Service
			for id, out := range map[string]any{"DaemonSet nodeproxy": &d, "Service nodeproxy": &s} {
				text := get(yaml.Marshal(got[id]))(t)
				do(t, yaml.UnmarshalStrict(text, out))
			}
			c := d.Spec.Template.Spec.Containers[0]
			for _, p := range []*v1.Probe{c.LivenessProbe, c.ReadinessProbe} {
				if at := fmt.Sprintf("--readyz-bind-address=%s:%d", p.HTTPGet.Host, p.HTTPGet.Port.IntVal); !slices.Contains(c.Args, at) {
					t.Errorf("no argument %s: %q", at, c.Args)
				}
			}
			if p := c.Ports[0]; p.ContainerPort != want || p.HostPort != want || s.Spec.Ports[0].Port != 9 {
				t.Errorf("%q: ports %+v, Service %+v", address, p, s.Spec.Ports)
			}
		}
	}
}

// TestChartIsLinted runs helm lint.
func TestChartIsLinted(t *testing.T) {
	result := lint.AllWithKubeVersion(chartFolder, map[string]any{"kubeadm": true}, "kube-system", nil)
	for _, m := range result.Messages {
		if m.Severity > support.InfoSev {
			t.Error(m)
		}
	}
}
