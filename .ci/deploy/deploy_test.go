package deploy

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// get returns a value, and ends the test with an error: get(f())(t).
func get[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T { t.Helper(); do(t, err); return v }
}

// do ends the test with an error.
func do(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestOverlaysBuildWhatTheAPIAccepts builds the base and each overlay. Every object must decode
// strictly, and a DaemonSet must mount only volumes that it has.
func TestOverlaysBuildWhatTheAPIAccepts(t *testing.T) {
	overlays, err := filepath.Glob(filepath.Join(folder, "overlays", "*"))
	if err != nil || len(overlays) != 3 {
		t.Fatalf("overlays %q, error %v", overlays, err)
	}
	for _, path := range append(overlays, filepath.Join(folder, "base")) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			kinds := map[string]int{}
			var service *v1.Service
			var monitor *serviceMonitor
			built := get(krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), path))(t)
			for _, r := range built.Resources() {
				text := get(r.AsYAML())(t)
				kinds[r.GetKind()]++
				var out any
				switch r.GetKind() {
				case "DaemonSet":
					out = &apps.DaemonSet{}
				case "ConfigMap":
					out = &v1.ConfigMap{}
				case "Service":
					out = &v1.Service{}
				case "ServiceAccount":
					out = &v1.ServiceAccount{}
				case "ClusterRole":
					out = &rbac.ClusterRole{}
				case "ClusterRoleBinding":
					out = &rbac.ClusterRoleBinding{}
				case "PrometheusRule":
					out = &prometheusRule{}
				case "ServiceMonitor":
					out = &serviceMonitor{}
				default:
					t.Fatalf("unexpected kind %s", r.GetKind())
				}
				if err := yaml.UnmarshalStrict(text, out); err != nil {
					t.Errorf("%s: %v\n%s", r.CurId(), err, text)
				}
				switch o := out.(type) {
				case *apps.DaemonSet:
					checkDaemonSet(t, filepath.Base(path), o)
				case *prometheusRule:
					checkAlerts(t, o)
				case *v1.Service:
					service = o
				case *serviceMonitor:
					monitor = o
				}
			}
			if kinds["DaemonSet"] != 1 || kinds["ServiceAccount"] != 1 || (kinds["PrometheusRule"] == 1) != strings.HasSuffix(path, "prometheus") {
				t.Errorf("built %v", kinds)
			}
			if monitor != nil {
				checkMonitor(t, monitor, service)
			}
		})
	}
}

// prometheusRule and serviceMonitor have the fields of the Prometheus operator's objects that the
// overlay uses.
type (
	prometheusRule struct {
		APIVersion, Kind string
		Metadata         map[string]any
		Spec             struct {
			Groups []struct {
				Name  string
				Rules []struct {
					Alert, Expr, For    string
					Labels, Annotations map[string]string
				}
			}
		}
	}
	serviceMonitor struct {
		APIVersion, Kind string
		Metadata         map[string]any
		Spec             struct {
			JobLabel  string
			Selector  struct{ MatchLabels map[string]string }
			Endpoints []struct{ Port string }
		}
	}
)

// perInstance matches the expression of an alert that fires for each agent that is down: the series
// of the agents, not a sum of them and not absent().
var perInstance = regexp.MustCompile(`^up\{[^}]*\} == 0$`)

// checkAlerts checks that each alert is complete, and that NodeproxyDown fires for one agent.
func checkAlerts(t *testing.T, r *prometheusRule) {
	t.Helper()
	down := 0
	for _, g := range r.Spec.Groups {
		for _, a := range g.Rules {
			_, err := time.ParseDuration(a.For)
			if a.Alert == "" || strings.TrimSpace(a.Expr) == "" || err != nil || a.Labels["severity"] == "" || a.Annotations["summary"] == "" {
				t.Errorf("alert %q: expr %q, for %q (%v), labels %v, annotations %v", a.Alert, a.Expr, a.For, err, a.Labels, a.Annotations)
			}
			if a.Alert != "NodeproxyDown" {
				continue
			}
			if down++; !perInstance.MatchString(a.Expr) {
				t.Errorf("NodeproxyDown does not fire for one agent: %s", a.Expr)
			}
		}
	}
	if down != 1 {
		t.Errorf("%d alerts NodeproxyDown", down)
	}
}

// checkMonitor checks that a ServiceMonitor selects the Service and names its port.
func checkMonitor(t *testing.T, m *serviceMonitor, s *v1.Service) {
	t.Helper()
	for k, v := range m.Spec.Selector.MatchLabels {
		if s.Labels[k] != v {
			t.Errorf("the monitor selects %s=%s; the Service's labels are %v", k, v, s.Labels)
		}
	}
	if len(m.Spec.Endpoints) != 1 || len(s.Spec.Ports) != 1 || m.Spec.Endpoints[0].Port != s.Spec.Ports[0].Name {
		t.Errorf("the monitor has the endpoints %v, the Service the ports %v", m.Spec.Endpoints, s.Spec.Ports)
	}
}

func checkDaemonSet(t *testing.T, overlay string, d *apps.DaemonSet) {
	t.Helper()
	pod := d.Spec.Template.Spec
	if s := pod.SecurityContext; s == nil || s.SeccompProfile == nil || s.SeccompProfile.Type != v1.SeccompProfileTypeRuntimeDefault || d.Spec.RevisionHistoryLimit == nil {
		t.Errorf("security context %v, history of revisions %v", s, d.Spec.RevisionHistoryLimit)
	}
	agent := pod.Containers[0]
	config := "/etc/nodeproxy/config.yaml"
	if overlay == "kubeadm" || overlay == "calico" {
		config = "/var/lib/kube-proxy/config.conf"
	}
	if !slices.Contains(agent.Args, "--config="+config) || !slices.Contains(pod.InitContainers[0].Args, config) {
		t.Errorf("arguments %q and %q lack the file %s", agent.Args, pod.InitContainers[0].Args, config)
	}
	for arg, in := range map[string]string{"--kube-proxy-table=always": "calico", "--service-traffic-metrics": "prometheus"} {
		if slices.Contains(agent.Args, arg) != (overlay == in) {
			t.Errorf("%s: arguments %q", overlay, agent.Args)
		}
	}
	// The label lets kube-prometheus scrape the pods, which a ServiceMonitor of its own does, too.
	if labeled := d.Spec.Template.Labels["k8s-app"] == "kube-proxy"; labeled != (overlay != "prometheus") {
		t.Errorf("%s: labels %v", overlay, d.Spec.Template.Labels)
	}
	own := slices.ContainsFunc(agent.Env, func(e v1.EnvVar) bool { return e.Name == "KUBERNETES_SERVICE_HOST" })
	if kubeadm := strings.HasPrefix(config, "/var"); own == kubeadm {
		t.Errorf("the API server's address is given: %v, with kubeadm's file: %v", own, kubeadm)
	}
	for _, c := range append(pod.InitContainers, pod.Containers...) {
		if !strings.HasPrefix(c.Image, "ghcr.io/go-proxier/nodeproxy:v") {
			t.Errorf("image %s", c.Image)
		}
		paths := 0
		for _, m := range c.VolumeMounts {
			if !slices.ContainsFunc(pod.Volumes, func(v v1.Volume) bool { return v.Name == m.Name }) {
				t.Errorf("%s mounts %s, which is no volume", c.Name, m.Name)
			}
			if strings.HasPrefix(config, m.MountPath+"/") {
				paths++
			}
		}
		if paths != 1 {
			t.Errorf("%s mounts the folder of %s %d times", c.Name, config, paths)
		}
	}
}

// TestStartupTaintComponentBuilds adds the component startup-taint to each overlay. The DaemonSet must
// have the flag, and the only right that is added is to patch nodes.
func TestStartupTaintComponentBuilds(t *testing.T) {
	overlays := get(filepath.Glob(filepath.Join(folder, "overlays", "*")))(t)
	for _, path := range append(overlays, filepath.Join(folder, "base")) {
		t.Run(filepath.Base(path), func(t *testing.T) {
			dir := withComponent(t, filepath.Join(t.TempDir(), "with-component"), get(filepath.Rel(folder, path))(t))
			built := get(krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir))(t)
			kinds := map[string]int{}
			for _, r := range built.Resources() {
				kinds[r.GetKind()]++
				text := get(r.AsYAML())(t)
				switch r.GetKind() {
				case "DaemonSet":
					var d apps.DaemonSet
					do(t, yaml.UnmarshalStrict(text, &d))
					if args := d.Spec.Template.Spec.Containers[0].Args; !slices.Contains(args, "--remove-startup-taint=go-proxier.github.io/not-ready") {
						t.Errorf("arguments %q", args)
					}
				case "ClusterRole":
					var c rbac.ClusterRole
					do(t, yaml.UnmarshalStrict(text, &c))
					patches := slices.ContainsFunc(c.Rules, func(r rbac.PolicyRule) bool {
						return slices.Contains(r.Verbs, "patch") && slices.Contains(r.Resources, "nodes")
					})
					if own := c.Name == "nodeproxy-startup-taint"; own != patches || own && (len(c.Rules) != 1 || len(c.Rules[0].Verbs) != 1 || len(c.Rules[0].Resources) != 1) {
						t.Errorf("role %s: %v", c.Name, c.Rules)
					}
				}
			}
			if kinds["ClusterRole"] != 2 || kinds["ClusterRoleBinding"] != 2 || kinds["ValidatingAdmissionPolicy"] != 1 || kinds["ValidatingAdmissionPolicyBinding"] != 1 {
				t.Errorf("built %v", kinds)
			}
		})
	}
}

// versions matches what a page, a manifest or a module names a version of this repository with.
var versions = regexp.MustCompile(`(?m)go-proxier/\S*(?:[@:]| +)v(\d+\.\d+\.\d+)|newTag: v(\d+\.\d+\.\d+)|^(?:version|appVersion): v?(\d+\.\d+\.\d+)`)

// named returns the versions that the files below a folder name, by file.
func named(t *testing.T, root string) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() && d.Name() == ".git" {
			return cmp.Or(err, filepath.SkipDir)
		}
		name, err := filepath.Rel(root, path)
		switch ext := filepath.Ext(path); {
		case err != nil || d.IsDir() || !d.Type().IsRegular() || d.Name() == "CHANGELOG.md":
			return err
		case ext != ".md" && ext != ".yaml" && ext != ".mod" && ext != ".work" && ext != ".tpl":
			return nil
		}
		text, err := os.ReadFile(path)
		for _, m := range versions.FindAllStringSubmatch(string(text), -1) {
			if v := m[1] + m[2] + m[3]; v != "0.0.0" { // which a module replaces
				out[name] = append(out[name], v)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestVersionIsTheSameEverywhere compares all versions of this repository that its files name with the one that the
// examples require, and sets another one in a copy.
func TestVersionIsTheSameEverywhere(t *testing.T) {
	const root, next = "../..", "31.41.59"
	found := named(t, root)
	version := found["examples/go.mod"][0]
	for name, n := range map[string]int{
		"README.md": 3, "go.work": 2, "examples/go.mod": 1, "examples/e2e/go.mod": 2,
		"examples/nodeproxy/deploy/base/kustomization.yaml": 1, "examples/nodeproxy/deploy/chart/Chart.yaml": 2,
	} {
		if len(found[name]) != n {
			t.Errorf("%s names the versions %q, want %d", name, found[name], n)
		}
	}
	fork := t.TempDir()
	for name, all := range found {
		if slices.ContainsFunc(all, func(v string) bool { return v != version }) {
			t.Errorf("%s names the versions %q, examples/go.mod %s", name, all, version)
		}
		copyFile(t, root, fork, name)
	}
	copyFile(t, root, fork, ".ci/release")
	copyFile(t, root, fork, ".github/CHANGELOG.md")
	if out, err := exec.Command("bash", filepath.Join(fork, ".ci/release"), "--set", next).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for name, all := range named(t, fork) {
		if len(all) != len(found[name]) || slices.ContainsFunc(all, func(v string) bool { return v != next }) {
			t.Errorf("after --set %s: %s names the versions %q", next, name, all)
		}
	}
	for _, at := range []struct{ root, version string }{{root, version}, {fork, next}} {
		changes, err := os.ReadFile(filepath.Join(at.root, ".github/CHANGELOG.md"))
		if err != nil || !strings.Contains(string(changes), "\n## ["+at.version+"] - 2") || !strings.Contains(string(changes), "\n## [Unreleased]\n") {
			t.Errorf("%v, or the changelog has no entry with a date for %s, or none for what comes after it", err, at.version)
		}
	}
}

// copyFile copies a file to the same place below another folder.
func copyFile(t *testing.T, from, to, name string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(from, name))
	if err == nil {
		err = os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(to, name), text, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestContributingNamesFoldersThatExist checks the first column of the table of folders.
func TestContributingNamesFoldersThatExist(t *testing.T) {
	text := get(os.ReadFile("../../.github/CONTRIBUTING.md"))(t)
	_, table, ok := strings.Cut(string(text), "| folder | what to look for |\n|---|---|\n")
	table, _, end := strings.Cut(table, "\n\n")
	if !ok || !end {
		t.Fatal("no table of folders")
	}
	named := regexp.MustCompile("`([^`]+)`")
	n := 0
	for line := range strings.Lines(table) {
		first := strings.Split(line, "|")[1]
		for _, m := range named.FindAllStringSubmatch(first, -1) {
			n++
			if _, err := os.Stat(filepath.Join("../..", m[1])); err != nil {
				t.Error(err)
			}
		}
	}
	if n < 12 {
		t.Errorf("only %d folders", n)
	}
}
