//go:build linux

package wholeagent

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// release is the last release, and its commit.
const release, releaseCommit = "v0.1.0", "ee51c7c"

// buildRelease builds nodeproxy of the last release, from the history of this checkout.
func buildRelease(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	out, err := exec.Command("sh", "-c", fmt.Sprintf(`root=$(git rev-parse --show-toplevel) && commit=$(git -C "$root" rev-parse -q --verify %s || echo %s) &&
		git -C "$root" archive "$commit" | tar -x -C %s`, release, releaseCommit, dir)).CombinedOutput()
	netlab.Need(t, err == nil, fmt.Sprintf("the commit of %s: %s", release, out))
	path := filepath.Join(dir, "nodeproxy")
	cmd := exec.Command("go", "build", "-o", path, "./examples/nodeproxy")
	cmd.Dir = dir
	must.Get(cmd.CombinedOutput())(t)
	return path
}

// upgradeFlags are the flags with which an agent has all metrics that do not need an API server.
func upgradeFlags(mode string) []string {
	flags := []string{"--metrics-bind-address", "192.0.2.1:10249", "--service-traffic-metrics", "--nodeport-addresses", "primary,localhost"}
	if mode != "userspace" {
		flags = append(flags, "--reset-connections-of-vanished-endpoints", "10s")
	}
	return flags
}

// surface returns the flags of a program's verb run, and metrics with their types and labels, a line
// each. Metrics of Go and of the process are left out.
func surface(t *testing.T, program, metrics string) []string {
	t.Helper()
	cmd := exec.Command(program, "run", "--help")
	cmd.Env = append(os.Environ(), programEnv+"=1")
	help := must.Get(cmd.Output())(t)
	var out []string
	for _, flag := range regexp.MustCompile(`(?m)^ +(?:-\w, )?(--[a-z0-9-]+)`).FindAllStringSubmatch(string(help), -1) {
		out = append(out, "flag "+flag[1])
	}
	for name, m := range parseMetrics(t, metrics) {
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		for _, series := range m.GetMetric() {
			var labels []string
			for _, l := range series.GetLabel() {
				labels = append(labels, l.GetName())
			}
			out = append(out, strings.TrimSpace(fmt.Sprintf("metric %s %s %s", name, strings.ToLower(m.GetType().String()), strings.Join(labels, ","))))
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// recorded returns the file with the flags and metrics of the last release in a mode.
func recorded(mode string) string { return "testdata/" + release + "-" + mode + ".txt" }

// TestFlagsAndMetricsOfTheReleaseStay looks for those of the last release in this tree. The
// changelog must name each that is gone, or has another type or other labels.
func TestFlagsAndMetricsOfTheReleaseStay(t *testing.T) {
	t.Parallel()
	changelog := must.Get(os.ReadFile("../../../../.github/CHANGELOG.md"))(t)
	notes, _, ok := strings.Cut(string(changelog), "\n## ["+strings.TrimPrefix(release, "v")+"]")
	if !ok {
		t.Fatalf("the changelog has no %s", release)
	}
	for _, mode := range []string{"nftables", "iptables", "userspace"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			needMode(t, mode)
			before := must.Get(os.ReadFile(recorded(mode)))(t)
			s := newSite(t)
			s.serveWeb(t, podIPs, append(upgradeFlags(mode), "--proxy-mode", mode)...)
			now := surface(t, "/proc/self/exe", metricsOn(t, s.Node, "192.0.2.1:10249"))
			for line := range strings.Lines(string(before)) {
				line = strings.TrimSuffix(line, "\n")
				if !slices.Contains(now, line) && !strings.Contains(notes, strings.Fields(line)[1]) {
					t.Errorf("neither here nor in the changelog: %s", line)
				}
			}
		})
	}
}

// TestUpgradeLosesNoConnection runs the last release and this tree one after the other, in each mode,
// there and back, with changes between them. Connections are opened all the time, and one stays open.
func TestUpgradeLosesNoConnection(t *testing.T) {
	testtime.NeedThorough(t) // it builds the last release
	t.Parallel()
	takeOverTools(t)
	old := buildRelease(t)
	for _, mode := range []string{"nftables", "iptables", "userspace"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			dir := t.TempDir()
			last := 0
			rollOut(t, dir, podIPs[last])
			run := func(path string) *process {
				t.Helper()
				p := startProgram(t, s.Node, path, nil, agentArgs(dir, mode, upgradeFlags(mode)...)...)
				p.synced(t, "services=1 endpoints=1 changed=1")
				return p
			}
			p := run(old)
			found := surface(t, old, metricsOn(t, s.Node, "192.0.2.1:10249"))
			keep := func(when string) {}
			if mode != "userspace" { // its connections end with the process
				long, stream := talk(t, s.Client, nodePort), s.stream()
				defer stream.Stop()
				keep = func(when string) {
					t.Helper()
					held(t, stream, when)
					if _, _, err := long.Ask(); err != nil {
						t.Errorf("%s: the old connection: %v", when, err)
					}
				}
			}
			for _, to := range []string{"/proc/self/exe", old, "/proc/self/exe"} {
				p.stop(t)
				keep("while no agent runs")
				last = (last + 1) % len(podIPs)
				rollOut(t, dir, podIPs[last])
				p = run(to)
				s.answeredBy(t, clusterVIP, podIPs[last])
				s.answeredBy(t, nodePort, podIPs[last])
				keep("with the next version")
				if p.loggedErrors() {
					t.Errorf("log:\n%s", p.log())
				}
			}
			if mode != "userspace" {
				s.explains(t, dir, mode, 0, "kernel: agrees")
			}
			text, err := os.ReadFile(recorded(mode))
			if got := strings.Join(found, "\n") + "\n"; err != nil || got != string(text) {
				t.Errorf("%s differs from what %s has, error %v:\n%s", recorded(mode), release, err, got)
			}
		})
	}
}
