package main

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// results holds the results of a run's tests by name, without tests that the run left out.
type results map[string]result

type result struct {
	status  string
	seconds float64
	why     string // the reason of a skip
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
			why := ""
			if c.Skipped != nil {
				why, _ = strings.CutPrefix(c.Skipped.Message, "skipped")
				why = strings.TrimPrefix(why, " - ")
			}
			if c.Status == skippedStatus && why == "" {
				continue
			}
			status := c.Status
			if status != passedStatus && status != skippedStatus {
				status = failedStatus // such as interrupted or timed out
			}
			r[name] = result{status, c.Seconds, why}
		}
	}
	return nil
}

// sums returns the numbers of passed, failed and skipped tests.
func (r results) sums() string {
	n := map[string]int{}
	for _, t := range r {
		n[t.status]++
	}
	return fmt.Sprintf("%d passed, %d failed, %d skipped", n[passedStatus], n[failedStatus], n[skippedStatus])
}

// table is the command "table". It prints a row for each test, and a column for each proxy
// and mode. If several runs have the same proxy and mode, the last one that ran a test
// counts.
func table(w io.Writer, dirs []string) error {
	columns := map[string]results{}
	for _, dir := range dirs {
		b, err := os.ReadFile(filepath.Join(dir, runFile))
		if err != nil {
			return err
		}
		var r run
		if err := json.Unmarshal(b, &r); err != nil {
			return fmt.Errorf("%s: %w", dir, err)
		}
		rs, err := readResults(dir)
		if err != nil {
			return err
		}
		column := r.Proxy + " " + r.Mode
		if columns[column] == nil {
			columns[column] = results{}
		}
		for test, result := range rs {
			// A test that was skipped in one run may have run in another.
			if _, ran := columns[column][test]; !ran || result.status != skippedStatus {
				columns[column][test] = result
			}
		}
	}
	// nodeproxy first
	titles := slices.SortedFunc(maps.Keys(columns), func(a, b string) int { return strings.Compare(b, a) })
	tests := map[string]bool{}
	for _, c := range columns {
		for t := range c {
			tests[t] = true
		}
	}
	fmt.Fprintf(w, "| | %s |\n|---|%s\n", strings.Join(titles, " | "), strings.Repeat("---|", len(titles)))
	fmt.Fprint(w, "| **all** |")
	for _, t := range titles {
		fmt.Fprintf(w, " %s |", columns[t].sums())
	}
	fmt.Fprintln(w)
	for _, t := range slices.Sorted(maps.Keys(tests)) {
		fmt.Fprintf(w, "| %s |", strings.ReplaceAll(strings.TrimPrefix(t, "[sig-network] "), "|", `\|`))
		for _, title := range titles {
			r, ok := columns[title][t]
			switch {
			case !ok:
				fmt.Fprint(w, " |")
			case r.status == passedStatus:
				fmt.Fprintf(w, " %.0f s |", r.seconds)
			default:
				fmt.Fprintf(w, " **%s** |", r.status)
			}
		}
		fmt.Fprintln(w)
	}
	return nil
}
