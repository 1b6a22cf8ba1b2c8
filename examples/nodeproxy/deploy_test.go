package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
)

// objects reads the Kubernetes objects of a file, and lets no unknown field pass.
func objects(t *testing.T, file string) []runtime.Object {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{v1.AddToScheme, apps.AddToScheme, rbac.AddToScheme} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(filepath.Join("deploy", file))
	if err != nil {
		t.Fatal(err)
	}
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

// parsed checks a command line of the agent.
func parsed(t *testing.T, args []string) *config.Config {
	t.Helper()
	if len(args) == 0 || args[0] != "run" {
		t.Fatalf("%q is not a command line of run", args)
	}
	c, err := parse(newFlags("run", "", io.Discard), args[1:], 0)
	if err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	if len(c.Notes) != 0 {
		t.Errorf("%q: notes %q", args, c.Notes)
	}
	return c
}

// TestDaemonSet holds the manifests to the program: what it is told it
// understands, with the configuration that comes with it.
func TestDaemonSet(t *testing.T) {
	list := objects(t, "daemonset.yaml")
	var file string
	var ds *apps.DaemonSet
	for _, o := range list {
		switch o := o.(type) {
		case *v1.ConfigMap:
			file = filepath.Join(t.TempDir(), "config.yaml")
			if err := os.WriteFile(file, []byte(o.Data["config.yaml"]), 0o644); err != nil {
				t.Fatal(err)
			}
		case *apps.DaemonSet:
			ds = o
		}
	}
	if file == "" || ds == nil {
		t.Fatal("no ConfigMap, or no DaemonSet")
	}
	spec := ds.Spec.Template.Spec
	for _, c := range append(spec.InitContainers, spec.Containers...) {
		var args []string
		for _, a := range c.Args {
			a = strings.ReplaceAll(a, "/etc/nodeproxy/config.yaml", file)
			args = append(args, strings.ReplaceAll(a, "$(NODE_NAME)", "n1"))
		}
		got := parsed(t, args)
		if got.Effective.Logging.Format != "json" || got.Mode != "nftables" {
			t.Errorf("%s: mode %s, logging %s", c.Name, got.Mode, got.Effective.Logging.Format)
		}
		if got.InitOnly != (c.Name == "parameters") {
			t.Errorf("%s: init-only is %v", c.Name, got.InitOnly)
		}
		if p := c.LivenessProbe; p != nil && "0.0.0.0:"+p.HTTPGet.Port.String() != got.Effective.HealthzBindAddress {
			t.Errorf("%s: probed at port %v, serves at %s", c.Name, p.HTTPGet.Port.String(), got.Effective.HealthzBindAddress)
		}
	}
	if spec.ServiceAccountName != "nodeproxy" || !spec.HostNetwork {
		t.Errorf("service account %q, host network %v", spec.ServiceAccountName, spec.HostNetwork)
	}
}

// TestRBAC holds the rights to what is needed, which TestEndToEnd shows to be
// enough.
func TestRBAC(t *testing.T) {
	for _, o := range objects(t, "rbac.yaml") {
		role, ok := o.(*rbac.ClusterRole)
		if !ok {
			continue
		}
		for _, r := range role.Rules {
			for _, word := range slices.Concat(r.APIGroups, r.Resources, r.Verbs) {
				if word == "*" {
					t.Errorf("everything is allowed by %v", r)
				}
			}
			writes := slices.ContainsFunc(r.Verbs, func(v string) bool { return v != "get" && v != "list" && v != "watch" })
			if writes && !slices.Equal(r.Resources, []string{"events"}) {
				t.Errorf("more than Events may be written: %v", r)
			}
		}
	}
}

// TestUnit holds the systemd unit to the program.
func TestUnit(t *testing.T) {
	text, err := os.ReadFile("deploy/nodeproxy.service")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "\nExecStart=/usr/local/bin/nodeproxy ")
	line, _, _ := strings.Cut(rest, "\n")
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	parsed(t, strings.Fields(strings.ReplaceAll(line, "/etc/nodeproxy/config.yaml", file)))
}
