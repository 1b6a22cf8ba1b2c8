//go:build linux

package backendtest

import (
	"net/netip"
	"os/exec"
	"testing"
	"time"

	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// maxReported is the largest number of failed connections to report.
const maxReported = 5

// Pods returns the IPv4 addresses and ports of the world's pods.
func Pods(w *conformance.World) []string {
	var out []string
	for _, p := range w.Pods() {
		out = append(out, netip.AddrPortFrom(p.Addr(tracker.IPv4), p.Ports()[0]).String())
	}
	return out
}

// Unharmed makes connections while f runs. It fails the test if one of them cannot be made, or if
// one that was open before does not live to the end.
func Unharmed(t *testing.T, w *conformance.World, to []conformance.Target, f func()) {
	t.Helper()
	start, held := time.Now(), w.Hold(to)
	c := w.Churn(to, f)
	t.Logf("%d connections in %v, %d failed; %d stayed open", c.Opened, time.Since(start).Round(time.Millisecond), len(c.Failures), held.Len())
	for _, err := range append(c.Failures[:min(len(c.Failures), maxReported)], held.Check()) {
		if err != nil {
			t.Error(err)
		}
	}
}

// KillAgents starts one agent after another on the world's node and kills each after a
// delay. An agent writes to its standard output when it is ready. KillAgents does not wait
// for every third agent to be ready; delay gets false for ready then. start must not set
// Stdout.
func KillAgents(t *testing.T, w *conformance.World, times int, start func(i int) *exec.Cmd, delay func(ready bool) time.Duration) {
	t.Helper()
	waited := 0
	for i := range times {
		cmd := start(i)
		output, err := cmd.StdoutPipe()
		if err != nil {
			t.Error(err)
			return
		}
		if err := w.Do(cmd.Start); err != nil {
			t.Error(err)
			return
		}
		ready := i%3 != 0
		if ready {
			if _, err := output.Read(make([]byte, 1)); err != nil {
				t.Errorf("the agent ended by itself: %v", err)
			}
			waited++
		}
		time.Sleep(delay(ready))
		// Killing fails only if the agent has ended, and waiting reports the signal.
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Logf("killed %d times, %d of them after the agent was ready", times, waited)
}
