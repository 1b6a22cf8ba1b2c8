package main

import (
	"encoding/csv"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

// results holds a line for each test and a column for each version, proxy and mode. A result is the number of
// seconds that the test took, if it passed, or failed or skipped. A test that a run left out has none.
type results map[string]map[string]string // title of the column, such as "Kubernetes v1.37.2 nodeproxy nftables"; test

const (
	failed  = "failed"
	skipped = "skipped"
)

// add adds a result. If the column has the test already, the later result counts, but a skipped test may have
// run before.
func (r results) add(title, test, result string) {
	if r[title] == nil {
		r[title] = map[string]string{}
	}
	if _, ran := r[title][test]; !ran || result != skipped {
		r[title][test] = result
	}
}

// addReports adds a column for Ginkgo's reports of a run. Setup and teardown count only if they failed.
func (r results) addReports(title string, reports []types.Report) {
	for _, report := range reports {
		for _, t := range report.SpecReports {
			name, test := t.FullText(), t.LeafNodeType == types.NodeTypeIt
			switch {
			case t.Failed() && !test:
				r.add(title, "["+t.LeafNodeType.String()+"]", failed)
			case t.Failed(): // or interrupted or timed out
				r.add(title, name, failed)
			case t.State == types.SpecStatePassed && test:
				r.add(title, name, fmt.Sprintf("%.0f", t.RunTime.Seconds()))
			case t.State == types.SpecStateSkipped && t.Failure.Message != "":
				r.add(title, name, skipped) // a test that the run's expressions left out has no message
			}
		}
	}
}

// titles returns the titles in the order of a table: newest Kubernetes and nodeproxy first.
func (r results) titles() []string {
	titles := slices.Sorted(maps.Keys(r))
	slices.Reverse(titles)
	return titles
}

// readResults merges files that write has written.
func readResults(paths []string) (results, error) {
	r := results{}
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		lines, err := csv.NewReader(f).ReadAll()
		if err != nil || len(lines) == 0 {
			return nil, fmt.Errorf("%s is not a table: %w", path, err)
		}
		for _, line := range lines[1:] {
			for i, result := range line[1:] {
				if result != "" {
					r.add(lines[0][i+1], line[0], result)
				}
			}
		}
	}
	return r, nil
}

// write writes CSV. Its first line has "test" and the titles; the others have a test and its results.
func (r results) write(w io.Writer) error {
	tests := map[string]bool{}
	for _, column := range r {
		for test := range column {
			tests[test] = true
		}
	}
	lines := [][]string{append([]string{"test"}, r.titles()...)}
	for _, test := range slices.Sorted(maps.Keys(tests)) {
		line := []string{test}
		for _, title := range r.titles() {
			line = append(line, r[title][test])
		}
		lines = append(lines, line)
	}
	return csv.NewWriter(w).WriteAll(lines)
}

// summary writes the numbers of tests in each column as Markdown, and the tests that failed.
func (r results) summary(w io.Writer) error {
	var b strings.Builder
	b.WriteString("| Kubernetes | proxy | mode | passed | failed | skipped |\n|---|---|---|---|---|---|\n")
	in := map[string][]string{} // the titles of the columns in which a test failed
	for _, title := range r.titles() {
		n := map[string]int{}
		for test, result := range r[title] {
			n[result]++
			if result == failed {
				in[test] = append(in[test], title)
			}
		}
		cells := strings.ReplaceAll(strings.TrimPrefix(title, "Kubernetes "), " ", " | ")
		fmt.Fprintf(&b, "| %s | %d | %d | %d |\n", cells, len(r[title])-n[failed]-n[skipped], n[failed], n[skipped])
	}
	if len(in) > 0 {
		b.WriteString("\nFailed:\n\n")
	}
	for _, test := range slices.Sorted(maps.Keys(in)) {
		fmt.Fprintf(&b, "- %s: %s\n", strings.TrimPrefix(test, "[sig-network] "), strings.Join(in[test], ", "))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
