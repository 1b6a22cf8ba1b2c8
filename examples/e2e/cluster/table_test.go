package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// writeRun writes the folder of a run, with a report as upstream's e2e.test writes it.
func writeRun(t *testing.T, title, cases string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{
		titleFile:      title,
		"junit_01.xml": `<?xml version="1.0" encoding="UTF-8"?><testsuites><testsuite name="Kubernetes e2e suite">` + cases + `</testsuite></testsuites>`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestTableOfSeveralRuns(t *testing.T) {
	ours := writeRun(t, "Kubernetes v1.37.2 nodeproxy nftables", `
<testcase name="[SynchronizedBeforeSuite]" status="passed" time="1"></testcase>
<testcase name="[It] [sig-network] Services should serve" status="passed" time="7.6"></testcase>
<testcase name="[It] [sig-network] Services should fail at first" status="failed" time="3"><failure type="failed"></failure></testcase>
<testcase name="[It] [sig-network] Services should need two zones" status="skipped" time="0.1"><skipped message="skipped - one zone"></skipped></testcase>
<testcase name="[It] [sig-network] Services should not be in focus" status="skipped" time="0"><skipped message="skipped"></skipped></testcase>
<testcase name="[It] [sig-network] Services should take long" status="interrupted" time="9"><error type="interrupted"></error></testcase>`)
	again := writeRun(t, "Kubernetes v1.37.2 nodeproxy nftables", `
<testcase name="[It] [sig-network] Services should fail at first" status="passed" time="2.2"></testcase>
<testcase name="[It] [sig-network] Services should serve" status="skipped" time="0.1"><skipped message="skipped - busy"></skipped></testcase>`)
	theirs := writeRun(t, "Kubernetes v1.37.2 kube-proxy nftables", `
<testcase name="[SynchronizedBeforeSuite]" status="failed" time="1"><failure type="failed"></failure></testcase>
<testcase name="[It] [sig-network] Services should serve" status="failed" time="60"><failure type="failed"></failure></testcase>`)
	var out bytes.Buffer
	if err := table(&out, []string{theirs, ours, again}); err != nil {
		t.Fatal(err)
	}
	want := `
test,Kubernetes v1.37.2 nodeproxy nftables,Kubernetes v1.37.2 kube-proxy nftables
[SynchronizedBeforeSuite],,failed
[sig-network] Services should fail at first,2,
[sig-network] Services should need two zones,skipped,
[sig-network] Services should serve,8,failed
[sig-network] Services should take long,failed,
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("the table is\n%s\nwant\n%s", got, want)
	}

	// A table is input for another one, beside runs, which is input for a summary.
	before := filepath.Join(t.TempDir(), "before.csv")
	if err := os.WriteFile(before, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	later := writeRun(t, "Kubernetes v1.37.2 kube-proxy nftables", `
<testcase name="[It] [sig-network] Services should serve" status="passed" time="60"></testcase>`)
	out.Reset()
	if err := table(&out, []string{before, later}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(before, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if err := summary(&out, before); err != nil {
		t.Fatal(err)
	}
	want = `
| Kubernetes | proxy | mode | passed | failed | skipped |
|---|---|---|---|---|---|
| v1.37.2 | nodeproxy | nftables | 2 | 1 | 1 |
| v1.37.2 | kube-proxy | nftables | 1 | 1 | 0 |

Failed:

- [SynchronizedBeforeSuite]: Kubernetes v1.37.2 kube-proxy nftables
- Services should take long: Kubernetes v1.37.2 nodeproxy nftables
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("the summary is\n%s\nwant\n%s", got, want)
	}
}

var update = flag.Bool("update", false, "rewrite the summary in README.md")

// TestSummaryIsThatOfTheData compares the summary in README.md with testdata.
func TestSummaryIsThatOfTheData(t *testing.T) {
	var b strings.Builder
	if err := summary(&b, "testdata/sig-network.csv"); err != nil {
		t.Fatal(err)
	}
	const page, begin, end = "../README.md", "<!-- made by cluster -->\n", "<!-- end -->\n"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok1 := strings.Cut(string(text), begin)
	written, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		t.Fatalf("no summary in %s", page)
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+b.String()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if written != b.String() {
		t.Errorf("the summary in %s is not that of testdata; \"go test -run Summary . -update\" writes it:\n%s", page, &b)
	}
}

func TestTableNeedsAReport(t *testing.T) {
	dir := writeRun(t, "Kubernetes v1.37.2 nodeproxy nftables", "")
	if err := os.Remove(filepath.Join(dir, "junit_01.xml")); err != nil {
		t.Fatal(err)
	}
	if err := table(&bytes.Buffer{}, []string{dir}); err == nil || !strings.Contains(err.Error(), "no junit*.xml") {
		t.Errorf("error %v, want one that names the missing report", err)
	}
}
