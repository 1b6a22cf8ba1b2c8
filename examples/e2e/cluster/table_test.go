package main

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/onsi/ginkgo/v2/types"
)

// spec returns the report of a test.
func spec(name string, state types.SpecState, seconds float64, message string) types.SpecReport {
	return types.SpecReport{
		LeafNodeType: types.NodeTypeIt, ContainerHierarchyTexts: []string{"[sig-network] Services"}, LeafNodeText: name,
		State: state, RunTime: time.Duration(seconds * float64(time.Second)), Failure: types.Failure{Message: message},
	}
}

func TestTableOfSeveralRuns(t *testing.T) {
	const ours, theirs = "Kubernetes v1.37.2 nodeproxy nftables", "Kubernetes v1.37.2 kube-proxy nftables"
	r := results{}
	add := func(title string, specs ...types.SpecReport) {
		r.addReports(title, []types.Report{{SpecReports: specs}})
	}
	add(ours,
		types.SpecReport{LeafNodeType: types.NodeTypeSynchronizedBeforeSuite, State: types.SpecStatePassed},
		spec("should serve", types.SpecStatePassed, 7.6, ""),
		spec("should fail at first", types.SpecStateFailed, 3, "no answer"),
		spec("should need two zones", types.SpecStateSkipped, 0.1, "one zone"),
		spec("should not be in focus", types.SpecStateSkipped, 0, ""),
		spec("should take long", types.SpecStateInterrupted, 9, "interrupted"))
	add(ours,
		spec("should fail at first", types.SpecStatePassed, 2.2, ""),
		spec("should serve", types.SpecStateSkipped, 0.1, "busy"))
	add(theirs,
		types.SpecReport{LeafNodeType: types.NodeTypeSynchronizedBeforeSuite, State: types.SpecStateFailed},
		spec("should serve", types.SpecStatePanicked, 1, "nil"))
	var out bytes.Buffer
	if err := r.write(&out); err != nil {
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

	// Tables are input for another one and for a summary.
	dir := t.TempDir()
	before, later := filepath.Join(dir, "before.csv"), filepath.Join(dir, "later.csv")
	passed := "test," + theirs + "\n[sig-network] Services should serve,60\n"
	if err := errors.Join(os.WriteFile(before, out.Bytes(), 0o644), os.WriteFile(later, []byte(passed), 0o644)); err != nil {
		t.Fatal(err)
	}
	r, err := readResults([]string{before, later})
	if err != nil {
		t.Fatal(err)
	}
	out.Reset()
	if err := r.summary(&out); err != nil {
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
	r, err := readResults([]string{"testdata/sig-network.csv"})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.summary(&b); err != nil {
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
