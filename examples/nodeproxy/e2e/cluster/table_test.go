package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeRun writes the folder of a run, with a report as upstream's e2e.test writes it.
func writeRun(t *testing.T, r run, cases string) string {
	t.Helper()
	dir := t.TempDir()
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		runFile:        string(b),
		"junit_01.xml": `<?xml version="1.0" encoding="UTF-8"?><testsuites><testsuite name="Kubernetes e2e suite">` + cases + `</testsuite></testsuites>`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestTableOfSeveralRuns(t *testing.T) {
	ours := writeRun(t, run{Proxy: "nodeproxy", Mode: "nftables"}, `
<testcase name="[SynchronizedBeforeSuite]" status="passed" time="1"></testcase>
<testcase name="[It] [sig-network] Services should serve" status="passed" time="7.6"></testcase>
<testcase name="[It] [sig-network] Services should fail at first" status="failed" time="3"><failure type="failed"></failure></testcase>
<testcase name="[It] [sig-network] Services should need two zones" status="skipped" time="0.1"><skipped message="skipped - one zone"></skipped></testcase>
<testcase name="[It] [sig-network] Services should not be in focus" status="skipped" time="0"><skipped message="skipped"></skipped></testcase>
<testcase name="[It] [sig-network] Services should take long" status="interrupted" time="9"><error type="interrupted"></error></testcase>`)
	again := writeRun(t, run{Proxy: "nodeproxy", Mode: "nftables"}, `
<testcase name="[It] [sig-network] Services should fail at first" status="passed" time="2.2"></testcase>
<testcase name="[It] [sig-network] Services should serve" status="skipped" time="0.1"><skipped message="skipped - busy"></skipped></testcase>`)
	theirs := writeRun(t, run{Proxy: "kube-proxy", Mode: "nftables"}, `
<testcase name="[SynchronizedBeforeSuite]" status="failed" time="1"><failure type="failed"></failure></testcase>
<testcase name="[It] [sig-network] Services should serve" status="failed" time="60"><failure type="failed"></failure></testcase>`)
	var out bytes.Buffer
	if err := table(&out, []string{theirs, ours, again}); err != nil {
		t.Fatal(err)
	}
	want := `
| | nodeproxy nftables | kube-proxy nftables |
|---|---|---|
| **all** | 2 passed, 1 failed, 1 skipped | 0 passed, 2 failed, 0 skipped |
| [SynchronizedBeforeSuite] | | **failed** |
| Services should fail at first | 2 s | |
| Services should need two zones | **skipped** | |
| Services should serve | 8 s | **failed** |
| Services should take long | **failed** | |
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("the table is\n%s\nwant\n%s", got, want)
	}
}

func TestTableNeedsAReport(t *testing.T) {
	dir := writeRun(t, run{Proxy: "nodeproxy", Mode: "nftables"}, "")
	if err := os.Remove(filepath.Join(dir, "junit_01.xml")); err != nil {
		t.Fatal(err)
	}
	if err := table(&bytes.Buffer{}, []string{dir}); err == nil || !strings.Contains(err.Error(), "no junit*.xml") {
		t.Errorf("error %v, want one that names the missing report", err)
	}
}

func TestProgressHasALineForEachTest(t *testing.T) {
	const output = `
Running Suite: Kubernetes e2e suite - /mnt
------------------------------
• [5.123 seconds]
[sig-network] Services should serve [Conformance] [sig-network, Conformance]
k8s.io/kubernetes/test/e2e/network/service.go:100

  Captured StdOut/StdErr Output >>
------------------------------
S [SKIPPED] [0.100 seconds]
[sig-network] Services should need two zones
------------------------------
• [FAILED] [61.000 seconds]
[sig-network] Services [It] should fail
`
	var out bytes.Buffer
	printProgress(&out, strings.NewReader(output))
	want := `
   1 ok        5.123s [sig-network] Services should serve [Conformance]
   2 skipped   0.100s [sig-network] Services should need two zones
   3 failed   61.000s [sig-network] Services [It] should fail
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("progress is\n%s\nwant\n%s", got, want)
	}
}
