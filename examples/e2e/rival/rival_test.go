//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/examples/internal/process"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// TestSetOfInvertsEndpoint tests the first and the last Service.
func TestSetOfInvertsEndpoint(t *testing.T) {
	for _, service := range []int{0, 1, maxServices - 1} {
		for set := range 2 {
			for _, n := range []int{0, endpoints - 1} {
				a := endpoint(service, set, n)
				if !endpointRange.Contains(a) {
					t.Errorf("%s is not within %s", a, endpointRange)
				}
				if gotService, gotSet := setOf(a); gotService != service || gotSet != set {
					t.Errorf("setOf(%s) = %d, %d, want %d, %d", a, gotService, gotSet, service, set)
				}
			}
		}
	}
}

var withKubeProxy = flag.Bool("with-kube-proxy", false, "measure the kube-proxy that PROXIER_KUBE_PROXY names, too, which takes 20 minutes")

// TestEveryPhaseIsMeasured makes short runs in both modes.
func TestEveryPhaseIsMeasured(t *testing.T) {
	testtime.NeedThorough(t)
	if !*withKubeProxy {
		t.Setenv("PROXIER_KUBE_PROXY", "")
	}
	controlplane.Need(t)
	dir := t.TempDir()
	var out strings.Builder
	must.Do(t, run(t.Context(), []string{"--short", "--services", "100", "--outage", "1s", "--dir", dir}, &out))
	r := must.Get(read([]string{filepath.Join(dir, "rival.json")}))(t)[0]
	if len(r.Runs) < 2 {
		t.Errorf("%d runs, want at least 2", len(r.Runs))
	}
	kinds := map[string]bool{}
	for _, run := range r.Runs {
		kinds[run.title()] = true
		if run.Start.Seconds == 0 || run.Start.PeakMiB == 0 || run.Change.Count == 0 || run.Change.CPUSeconds == 0 || run.Burst.Count == 0 || run.Connections.PerSecond == 0 || run.Connections.DirectPerSecond == 0 || len(run.FollowedSeconds) != 1 || run.Failed != "" {
			t.Errorf("a phase was not measured: %+v", run)
		}
		if row := "| " + run.Mode + " | 100 | " + run.title() + " |"; !strings.Contains(out.String(), row) {
			t.Errorf("no row %q in the table:\n%s", row, &out)
		}
	}
	if os.Getenv("PROXIER_KUBE_PROXY") != "" && len(kinds) != 3 {
		t.Errorf("measured %v, want kube-proxy with two periods and nodeproxy", kinds)
	}
}

var inVM = flag.String("vm", "", "rival's flags for TestRivalInVM, separated by spaces")

// TestRivalInVM runs the command in a virtual machine, where mode ipvs is supported. It prints the
// tables, and the JSON as one line:
//
//	go test -run TestRivalInVM -v -timeout 2h . -vm '--modes ipvs --services 100,1000 --changes-only --short'
//
// PROXIER_KUBE_PROXY, PROXIER_KUBE_APISERVER and PROXIER_ETCD name programs that need no shared
// libraries.
func TestRivalInVM(t *testing.T) {
	if *inVM == "" {
		t.Skip("takes many minutes: runs if -vm is given")
	}
	if os.Getenv("PROXIER_VM_INSIDE") == "" {
		// The machine gets the folder testdata.
		controlplane.Need(t)
		kubeProxy, dir := os.Getenv("PROXIER_KUBE_PROXY"), t.TempDir()
		apiserver, etcd, err := controlplane.Find()
		must.Do(t, err)
		netlab.Need(t, kubeProxy != "", "PROXIER_KUBE_PROXY: a kube-proxy")
		must.Do(t, os.Mkdir(filepath.Join(dir, "testdata"), 0o755))
		must.Get(process.Nodeproxy(t.Context(), "", filepath.Join(dir, "testdata"), "CGO_ENABLED=0"))(t)
		for name, path := range map[string]string{"kube-apiserver": apiserver, "etcd": etcd, "kube-proxy": kubeProxy} {
			must.Do(t, os.Symlink(path, filepath.Join(dir, "testdata", name)))
		}
		t.Chdir(dir)
	}
	if !vm.Inside(t, vm.IPVS) {
		return
	}
	dir := t.TempDir()
	args := append(strings.Fields(*inVM), "--dir", dir, "--nodeproxy", "testdata/nodeproxy")
	for name, env := range map[string]string{"kube-apiserver": "PROXIER_KUBE_APISERVER", "etcd": "PROXIER_ETCD", "kube-proxy": "PROXIER_KUBE_PROXY"} {
		t.Setenv(env, must.Get(filepath.Abs("testdata/"+name))(t))
	}
	if err := run(t.Context(), args, t.Output()); err != nil {
		t.Error(err)
	}
	var text bytes.Buffer
	if data, err := os.ReadFile(filepath.Join(dir, "rival.json")); err != nil {
		t.Error(err)
	} else if err := json.Compact(&text, data); err != nil {
		t.Error(err)
	}
	t.Logf("%s", &text)
}

var update = flag.Bool("update", false, "rewrite the table in MEASUREMENTS.md")

// TestTableIsThatOfTheData compares the table in MEASUREMENTS.md with testdata.
func TestTableIsThatOfTheData(t *testing.T) {
	var b strings.Builder
	must.Do(t, run(t.Context(), []string{"testdata/rival-45000.json", "testdata/rival-10000.json", "testdata/rival.json", "testdata/vm/rival.json"}, &b))
	const begin = "<!-- made by examples/e2e/rival -->\n"
	const page, end = "../MEASUREMENTS.md", "<!-- end -->\n"
	text := must.Get(os.ReadFile(page))(t)
	before, rest, ok1 := strings.Cut(string(text), begin)
	written, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("no table in %s", page)
	}
	if *update {
		must.Do(t, os.WriteFile(page, []byte(before+begin+b.String()+end+after), 0o644))
	} else if written != b.String() {
		t.Errorf("the table in %s is not that of testdata; \"go test -run Table . -update\" writes it:\n%s", page, &b)
	}
}

// TestLaterRunsReplaceEarlierOnes merges two reports.
func TestLaterRunsReplaceEarlierOnes(t *testing.T) {
	run := func(mode string, services int, seconds float64) Run {
		return Run{Proxy: nodeproxy, Mode: mode, Services: services, Start: Start{Seconds: seconds}}
	}
	var b strings.Builder
	must.Do(t, Markdown(&b, &Report{Runs: []Run{run("iptables", 3000, 1), run("nftables", 45000, 2), run("nftables", 100, 3)}}, &Report{Runs: []Run{run("nftables", 45000, 4)}}))
	var rows []string
	for line := range strings.Lines(b.String()) {
		if f := strings.Split(strings.TrimSuffix(line, " |\n"), " | "); strings.Contains(line, "| nodeproxy |") && len(rows) < 3 {
			rows = append(rows, strings.Join(f[:4], " "))
		}
	}
	if want := []string{"| nftables 100 nodeproxy 3.00", "| nftables 45,000 nodeproxy 4.00", "| iptables 3,000 nodeproxy 1.00"}; !slices.Equal(rows, want) {
		t.Errorf("rows %q, want %q", rows, want)
	}
}

// TestGraphIsThatOfTheData compares the pictures in the tree with the ones of the data beside them.
func TestGraphIsThatOfTheData(t *testing.T) {
	dir := t.TempDir()
	reports := must.Get(read([]string{"testdata/rival-45000.json", "testdata/rival-10000.json", "testdata/rival.json"}))(t)
	must.Do(t, draw(dir, "testdata/nftables.txt", reports))
	for _, name := range []string{"one-change-light.svg", "one-change-dark.svg"} {
		drawn := must.Get(os.ReadFile(filepath.Join(dir, name)))(t)
		if kept := must.Get(os.ReadFile(name))(t); string(kept) != string(drawn) || xml.Unmarshal(drawn, new(any)) != nil {
			t.Errorf("%s is not XML, or differs from the picture that go generate draws", name)
		}
	}
	if err := draw(dir, "testdata/nftables.txt", reports[:1]); err == nil || !strings.Contains(err.Error(), "no figures for kube-proxy") {
		t.Errorf("without kube-proxy: %v", err)
	}
}

func TestMain(m *testing.M) { netlab.Main(m) }
