package main

import (
	"cmp"
	"encoding/csv"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// results holds the results of a run's tests by name, without tests that the run left out.
type results map[string]result

type result struct {
	status  string
	seconds float64
}

// Ginkgo's names for results.
const (
	passedStatus  = "passed"
	failedStatus  = "failed"
	skippedStatus = "skipped"
)

// readResults reads the report that e2e.test left in a run's folder.
func readResults(dir string) (results, error) {
	files, err := filepath.Glob(filepath.Join(dir, "junit*.xml"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no junit*.xml in %s", dir)
	}
	all := results{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		if err := all.parse(b); err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
	}
	return all, nil
}

func (r results) parse(junit []byte) error {
	var report struct {
		Suites []struct {
			Cases []struct {
				Name    string  `xml:"name,attr"`
				Status  string  `xml:"status,attr"`
				Seconds float64 `xml:"time,attr"`
				Skipped *struct {
					Message string `xml:"message,attr"`
				} `xml:"skipped"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(junit, &report); err != nil {
		return err
	}
	for _, s := range report.Suites {
		for _, c := range s.Cases {
			name, ok := strings.CutPrefix(c.Name, "[It] ")
			if !ok { // setup and teardown count only if they failed
				if c.Status == passedStatus || c.Status == skippedStatus {
					continue
				}
				name = c.Name
			}
			// A test that the run's expressions left out is skipped too, but without a reason.
			if c.Status == skippedStatus && (c.Skipped == nil || strings.TrimPrefix(strings.TrimPrefix(c.Skipped.Message, "skipped"), " - ") == "") {
				continue
			}
			status := c.Status
			if status != passedStatus && status != skippedStatus {
				status = failedStatus // such as interrupted or timed out
			}
			r[name] = result{status, c.Seconds}
		}
	}
	return nil
}

// count returns the number of tests with each status.
func (r results) count() map[string]int {
	n := map[string]int{}
	for _, t := range r {
		n[t.status]++
	}
	return n
}

// sums returns the numbers of passed, failed and skipped tests.
func (r results) sums() string {
	n := r.count()
	return fmt.Sprintf("%d passed, %d failed, %d skipped", n[passedStatus], n[failedStatus], n[skippedStatus])
}

// column is what the runs of one column of a table have in common.
type column struct{ kubernetes, proxy, mode string }

// String returns the column's title in a table.
func (c column) String() string {
	return "Kubernetes " + c.kubernetes + " " + c.proxy + " " + c.mode
}

func parseColumn(title string) (column, error) {
	f := strings.Fields(title)
	if len(f) != 4 || f[0] != "Kubernetes" {
		return column{}, fmt.Errorf("column %q is not Kubernetes, a version, a proxy and a mode", title)
	}
	return column{f[1], f[2], f[3]}, nil
}

type columns map[column]results

// add adds results. If a column has a test already, the later result counts, but a skipped test
// may have run before.
func (cs columns) add(c column, rs results) {
	if cs[c] == nil {
		cs[c] = results{}
	}
	for test, r := range rs {
		if _, ran := cs[c][test]; !ran || r.status != skippedStatus {
			cs[c][test] = r
		}
	}
}

// sorted returns the columns in the order of a table: newest Kubernetes and nodeproxy first.
func (cs columns) sorted() []column {
	return slices.SortedFunc(maps.Keys(cs), func(a, b column) int {
		return cmp.Or(strings.Compare(b.kubernetes, a.kubernetes), strings.Compare(b.proxy, a.proxy), strings.Compare(b.mode, a.mode))
	})
}

// tests returns the names of all tests in order.
func (cs columns) tests() []string {
	tests := map[string]bool{}
	for _, c := range cs {
		for t := range c {
			tests[t] = true
		}
	}
	return slices.Sorted(maps.Keys(tests))
}

// readColumns reads folders of runs, and tables that writeTable wrote.
func readColumns(paths []string) (columns, error) {
	cs := columns{}
	for _, path := range paths {
		if filepath.Ext(path) == ".csv" {
			if err := cs.readTable(path); err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			continue
		}
		b, err := os.ReadFile(filepath.Join(path, runFile))
		if err != nil {
			return nil, err
		}
		var r run
		if err := json.Unmarshal(b, &r); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		rs, err := readResults(path)
		if err != nil {
			return nil, err
		}
		cs.add(column{r.Kubernetes, r.Proxy, r.Mode}, rs)
	}
	return cs, nil
}

// readTable adds the columns of a table. Its first line has "test" and the columns; the others
// have a test and its results.
func (cs columns) readTable(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	lines, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return err
	}
	for n, line := range lines {
		for i, cell := range line[1:] {
			c, err := parseColumn(lines[0][i+1])
			if err != nil {
				return err
			}
			if n == 0 || cell == "" {
				continue
			}
			r := result{status: cell}
			if cell != failedStatus && cell != skippedStatus {
				r.status = passedStatus
				if r.seconds, err = strconv.ParseFloat(cell, 64); err != nil {
					return fmt.Errorf("%s: %w", line[0], err)
				}
			}
			cs.add(c, results{line[0]: r})
		}
	}
	return nil
}

// table is the command "table". It writes a line for each test, and a column for each version,
// proxy and mode, as CSV: the seconds that the test took if it passed, or else its status.
func table(w io.Writer, paths []string) error {
	cs, err := readColumns(paths)
	if err != nil {
		return err
	}
	out := csv.NewWriter(w)
	line := []string{"test"}
	for _, c := range cs.sorted() {
		line = append(line, c.String())
	}
	out.Write(line) // Flush reports its error
	for _, t := range cs.tests() {
		line = append(line[:0], t)
		for _, c := range cs.sorted() {
			r, ok := cs[c][t]
			switch {
			case !ok:
				line = append(line, "")
			case r.status == passedStatus:
				line = append(line, fmt.Sprintf("%.0f", r.seconds))
			default:
				line = append(line, r.status)
			}
		}
		out.Write(line)
	}
	out.Flush()
	return out.Error()
}

// summary is the command "summary". It writes the numbers of tests in each column as Markdown,
// and the tests that failed.
func summary(w io.Writer, paths []string) error {
	cs, err := readColumns(paths)
	if err != nil {
		return err
	}
	fmt.Fprint(w, "| Kubernetes | proxy | mode | passed | failed | skipped |\n|---|---|---|---|---|---|\n")
	failed := map[string][]string{}
	for _, c := range cs.sorted() {
		n := cs[c].count()
		fmt.Fprintf(w, "| %s | %s | %s | %d | %d | %d |\n", c.kubernetes, c.proxy, c.mode, n[passedStatus], n[failedStatus], n[skippedStatus])
		for t, r := range cs[c] {
			if r.status == failedStatus {
				failed[t] = append(failed[t], c.String())
			}
		}
	}
	if len(failed) == 0 {
		return nil
	}
	fmt.Fprint(w, "\nFailed:\n\n")
	for _, t := range slices.Sorted(maps.Keys(failed)) {
		fmt.Fprintf(w, "- %s: %s\n", strings.TrimPrefix(t, "[sig-network] "), strings.Join(failed[t], ", "))
	}
	return nil
}
