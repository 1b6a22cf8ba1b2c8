package main

import (
	"fmt"
	"os"
	"testing"

	"github.com/go-proxier/proxier/runner/health"
)

// TestIdleConnectionsAreBounded opens 2,000 connections to each server of the agent. Its
// descriptors must stay bounded, and it must still answer.
func TestIdleConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[0]))
	p := start(t, s.node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--metrics-bind-address", "192.0.2.1:10249")
	p.synced(t, "services=1 endpoints=1 changed=1")
	descriptors := func() int {
		t.Helper()
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(list)
	}
	before := descriptors()
	for i, url := range []string{"192.0.2.1:10256", "192.0.2.1:10249"} {
		for range 2000 {
			conn, err := dial(s.client, "tcp", "", url, noAnswerTimeout)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
		}
		if code, body, _ := get(t, s.client, "http://"+url+"/healthz"); code != 200 {
			t.Errorf("%s: %d %s", url, code, body)
		}
		if n := descriptors(); n > before+(i+1)*health.MaxConns+10 {
			t.Errorf("%s: %d descriptors, %d before", url, n, before)
		}
	}
}
