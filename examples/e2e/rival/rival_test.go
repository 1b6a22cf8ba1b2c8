//go:build linux

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/controlplane"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// TestSetOfInvertsEndpoint tests the first and the last Service.
func TestSetOfInvertsEndpoint(t *testing.T) {
	for _, service := range []int{0, 1, maxServices - 1} {
		for set := range 3 {
			for _, n := range []int{0, maxEndpoints - 1} {
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

// TestShareIsAQuotientOfMeans computes rates whose quotient and error are known.
func TestShareIsAQuotientOfMeans(t *testing.T) {
	for _, c := range []struct {
		service, direct []float64
		want            Connections
	}{
		{[]float64{90}, []float64{100}, Connections{Rounds: 1, PerSecond: 90, DirectPerSecond: 100, Share: 0.9}},
		{[]float64{90, 180}, []float64{100, 200}, Connections{Rounds: 2, PerSecond: 135, DirectPerSecond: 150, Share: 0.9}},
		// The differences from 90 % are 3 and -3: the mean's error is 3, of 100.
		{[]float64{93, 87}, []float64{100, 100}, Connections{Rounds: 2, PerSecond: 90, DirectPerSecond: 100, Share: 0.9, ShareError: 0.03}},
	} {
		got := rates(c.service, c.direct)
		near := func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }
		if got.Rounds != c.want.Rounds || !near(got.PerSecond, c.want.PerSecond) || !near(got.DirectPerSecond, c.want.DirectPerSecond) ||
			!near(got.Share, c.want.Share) || !near(got.ShareError, c.want.ShareError) {
			t.Errorf("rates(%v, %v) = %+v, want %+v", c.service, c.direct, got, c.want)
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
	programs := controlplane.Need(t)
	dir := t.TempDir()
	var out strings.Builder
	file := filepath.Join(dir, "rival.json")
	must.Do(t, run(t.Context(), []string{"--short", "--idle", "1s", "--kube-apiserver", programs.APIServer, "--json", file, "--logs", dir}, &out))
	text := must.Get(os.ReadFile(file))(t)
	var r Report
	must.Do(t, json.Unmarshal(text, &r))
	if len(r.Runs) < 2 {
		t.Errorf("%d runs, want at least 2", len(r.Runs))
	}
	if r.Outages == nil || len(r.Outages.Proxies) != len(r.Runs) {
		t.Errorf("outages %+v, want one proxy for each of %d runs", r.Outages, len(r.Runs))
	} else {
		for _, p := range r.Outages.Proxies {
			if len(p.FollowedSeconds) != 1 {
				t.Errorf("an outage was not measured: %+v", p)
			}
		}
	}
	kinds := map[string]bool{}
	for _, run := range r.Runs {
		kinds[run.title()] = true
		if run.Failed != "" {
			t.Errorf("%s in mode %s: %s", run.title(), run.Mode, run.Failed)
		}
		if run.Start.Seconds == 0 || run.Change.Count == 0 || run.Resize.Count == 0 || run.Burst.Changes == 0 || run.Connections.Rounds == 0 || run.Connections.PerSecond == 0 || run.Connections.Share == 0 || run.Idle.Seconds == 0 {
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
//	go test -run TestRivalInVM -v -timeout 2h . -vm '--modes ipvs --services 100,1000 --alone= --changes-only --starts 2 --changes 20'
//
// PROXIER_KUBE_PROXY, PROXIER_KUBE_APISERVER and PROXIER_ETCD name programs that need no shared
// libraries.
func TestRivalInVM(t *testing.T) {
	if *inVM == "" {
		t.Skip("takes many minutes: runs if -vm is given")
	}
	if os.Getenv("PROXIER_VM_INSIDE") == "" {
		// The machine gets the folder testdata.
		control, kubeProxy, dir := controlplane.Need(t), os.Getenv("PROXIER_KUBE_PROXY"), t.TempDir()
		netlab.Need(t, kubeProxy != "", "PROXIER_KUBE_PROXY: a kube-proxy")
		build := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, "testdata/nodeproxy"), "github.com/go-proxier/proxier/examples/nodeproxy")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if text, err := build.CombinedOutput(); err != nil {
			t.Fatalf("cannot build nodeproxy: %v\n%s", err, text)
		}
		for name, path := range map[string]string{"kube-apiserver": control.APIServer, "etcd": control.Etcd, "kube-proxy": kubeProxy} {
			must.Do(t, os.Symlink(path, filepath.Join(dir, "testdata", name)))
		}
		t.Chdir(dir)
	}
	if !vm.Inside(t, vm.IPVS) {
		return
	}
	file := filepath.Join(t.TempDir(), "rival.json")
	args := append(strings.Fields(*inVM), "--json", file)
	for _, name := range []string{"nodeproxy", "kube-apiserver", "etcd", "kube-proxy"} {
		args = append(args, "--"+name, "/work/testdata/"+name)
	}
	if err := run(t.Context(), args, t.Output()); err != nil {
		t.Error(err)
	}
	var text bytes.Buffer
	if data, err := os.ReadFile(file); err != nil {
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
	must.Do(t, run(t.Context(), []string{"--table", "testdata/rival-45000.json", "testdata/rival-10000.json", "testdata/rival.json", "testdata/vm/rival.json"}, &b))
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

func TestMain(m *testing.M) { netlab.Main(m) }
