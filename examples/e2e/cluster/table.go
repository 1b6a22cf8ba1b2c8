package main

import (
	"encoding/csv"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A result of a test is the number of seconds that it took, if it passed, or failed or skipped.
const (
	passedStatus  = "passed"
	failedStatus  = "failed"
	skippedStatus = "skipped"
)

// column holds the results of runs by test, without tests that the runs left out.
type column map[string]string

// titleFile is the file in a run's folder with the title of its column, such as "Kubernetes v1.37.2 nodeproxy nftables".
const titleFile = "title"

// readRun reads the report that e2e.test left in a run's folder.
func readRun(dir string) (column, error) {
	files, err := filepath.Glob(filepath.Join(dir, "junit*.xml"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("no junit*.xml in %s", dir)
	}
	c := column{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err == nil {
			err = c.parse(b)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
	}
	return c, err
}

func (c column) parse(junit []byte) error {
	var report struct {
		Cases []struct {
			Name    string  `xml:"name,attr"`
			Status  string  `xml:"status,attr"`
			Seconds float64 `xml:"time,attr"`
			Skipped struct {
				Message string `xml:"message,attr"`
			} `xml:"skipped"`
		} `xml:"testsuite>testcase"`
	}
	if err := xml.Unmarshal(junit, &report); err != nil {
		return err
	}
	for _, t := range report.Cases {
		name, test := strings.CutPrefix(t.Name, "[It] ")
		switch {
		case t.Status == passedStatus && test:
			c[name] = fmt.Sprintf("%.0f", t.Seconds)
		case t.Status == passedStatus: // setup and teardown count only if they failed
		case t.Status != skippedStatus:
			c[name] = failedStatus // such as interrupted or timed out
		case test && strings.Trim(strings.TrimPrefix(t.Skipped.Message, "skipped"), " -") != "":
			c[name] = skippedStatus // a test that the run's expressions left out is skipped, too, but without a reason
		}
	}
	return nil
}

// count returns the number of tests with each status, and the names of those that failed.
func (c column) count() (n map[string]int, failed []string) {
	n = map[string]int{}
	for test, result := range c {
		switch result {
		case failedStatus:
			failed = append(failed, test)
			n[result]++
		case skippedStatus:
			n[result]++
		default:
			n[passedStatus]++
		}
	}
	return n, failed
}

// columns holds columns by title.
type columns map[string]column

// add adds results. If a column has a test already, the later result counts, but a skipped test
// may have run before.
func (cs columns) add(title string, c column) {
	if cs[title] == nil {
		cs[title] = column{}
	}
	for test, result := range c {
		if _, ran := cs[title][test]; !ran || result != skippedStatus {
			cs[title][test] = result
		}
	}
}

// sorted returns the titles in the order of a table: newest Kubernetes and nodeproxy first.
func (cs columns) sorted() []string {
	titles := slices.Sorted(maps.Keys(cs))
	slices.Reverse(titles)
	return titles
}

// readTable adds the columns of a table. Its first line has "test" and the titles; the others
// have a test and its results.
func (cs columns) readTable(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	lines, err := csv.NewReader(f).ReadAll()
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, line := range lines[1:] {
		for i, result := range line[1:] {
			if result != "" {
				cs.add(lines[0][i+1], column{line[0]: result})
			}
		}
	}
	return nil
}

// table is the command "table". It writes the results of runs and of earlier tables as CSV: a line for each
// test, and a column for each version, proxy and mode.
func table(w io.Writer, paths []string) error {
	cs, tests := columns{}, map[string]bool{}
	for _, path := range paths {
		if filepath.Ext(path) == ".csv" {
			if err := cs.readTable(path); err != nil {
				return err
			}
			continue
		}
		title, err := os.ReadFile(filepath.Join(path, titleFile))
		if err != nil {
			return err
		}
		c, err := readRun(path)
		if err != nil {
			return err
		}
		cs.add(string(title), c)
	}
	for _, c := range cs {
		for test := range c {
			tests[test] = true
		}
	}
	out := csv.NewWriter(w)
	out.Write(append([]string{"test"}, cs.sorted()...)) // Flush reports its error
	for _, test := range slices.Sorted(maps.Keys(tests)) {
		line := []string{test}
		for _, title := range cs.sorted() {
			line = append(line, cs[title][test])
		}
		out.Write(line)
	}
	out.Flush()
	return out.Error()
}

// summary is the command "summary". It writes the numbers of tests in each column of a table as Markdown,
// and the tests that failed.
func summary(w io.Writer, path string) error {
	cs := columns{}
	if err := cs.readTable(path); err != nil {
		return err
	}
	fmt.Fprint(w, "| Kubernetes | proxy | mode | passed | failed | skipped |\n|---|---|---|---|---|---|\n")
	in := map[string][]string{} // the titles of the columns in which a test failed
	for _, title := range cs.sorted() {
		n, failed := cs[title].count()
		cells := strings.ReplaceAll(strings.TrimPrefix(title, "Kubernetes "), " ", " | ")
		fmt.Fprintf(w, "| %s | %d | %d | %d |\n", cells, n[passedStatus], n[failedStatus], n[skippedStatus])
		for _, test := range failed {
			in[test] = append(in[test], title)
		}
	}
	if len(in) > 0 {
		fmt.Fprint(w, "\nFailed:\n\n")
	}
	for _, test := range slices.Sorted(maps.Keys(in)) {
		fmt.Fprintf(w, "- %s: %s\n", strings.TrimPrefix(test, "[sig-network] "), strings.Join(in[test], ", "))
	}
	return nil
}
