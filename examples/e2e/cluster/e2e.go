package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// run describes one run of tests. The run's folder holds it in runFile, beside upstream's
// report.
type run struct {
	Proxy, Mode, Focus, Skip string
	Kubernetes               string
	Start                    time.Time
	Took                     string
}

const runFile = "run.json"

func test(ctx context.Context, o options, mode, focus string) error {
	return withProxy(ctx, o, mode, func(ctx context.Context, s settings, control place) error {
		// Ginkgo gets time to report what the timeout interrupted.
		ctx, cancel := context.WithTimeout(ctx, o.timeout+time.Minute)
		defer cancel()
		var skips []string
		if o.skip != "" {
			skips = append(skips, o.skip)
		}
		for _, e := range unsupported() {
			skips = append(skips, e.expression)
			fmt.Printf("leaving out %s: %s\n", e.expression, e.why)
		}
		skip := strings.Join(skips, "|")
		r := run{Proxy: o.proxy, Mode: mode, Focus: focus, Skip: skip, Kubernetes: s.Version, Start: time.Now().Truncate(time.Second)}
		name := filepath.Join("runs", fmt.Sprintf("%s-%s-%s", r.Proxy, r.Mode, r.Start.Format("20060102-150405")))
		dir, inside := filepath.Join(s.Dir, name), filepath.Join(cacheInside, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		log, err := os.Create(filepath.Join(dir, "log"))
		if err != nil {
			return err
		}
		defer log.Close()
		ginkgo := s.inside().bin("ginkgo")
		args := []string{
			rolePrefix + "bounded", ginkgo, "run", "-v", "--no-color", "--keep-going", "--output-interceptor-mode=none",
			fmt.Sprintf("--procs=%d", o.procs), "--timeout=" + o.timeout.String(), fmt.Sprintf("--flake-attempts=%d", o.flakeAttempts),
			"--focus=" + focus, "--skip=" + skip, s.inside().bin("e2e.test"), "--",
			"--kubeconfig=" + s.inside().state("admin.conf"), "--provider=skeleton", fmt.Sprintf("--num-nodes=%d", s.Nodes),
			"--kubectl-path=" + s.inside().bin("kubectl"), "--report-dir=" + inside, "--dump-logs-on-failure=false",
			"--allowed-not-ready-nodes=0", "--node-os-distro=custom",
		}
		read, write, err := os.Pipe()
		if err != nil {
			return err
		}
		defer read.Close()
		p, err := control.start(&exec.Cmd{Path: "/proc/self/exe", Args: args, Env: s.inside().environment(), Stdout: write, Stderr: write})
		write.Close()
		if err != nil {
			return err
		}
		fmt.Printf("running tests; results are in %s\n", dir)
		printed := make(chan struct{})
		go func() {
			defer close(printed)
			printProgress(os.Stdout, io.TeeReader(read, log))
		}()
		select {
		case <-p.done:
		case <-ctx.Done():
			p.cmd.Process.Kill()
			<-p.done
		}
		<-printed
		r.Took = time.Since(r.Start).Round(time.Second).String()
		b, err := json.MarshalIndent(r, "", "  ")
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, runFile), append(b, '\n'), 0o644); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		results, err := readResults(dir)
		if err != nil {
			return fmt.Errorf("cannot read the tests' report (see %s): %w", log.Name(), err)
		}
		fmt.Printf("%s %s: %s in %s\n", r.Proxy, r.Mode, results.sums(), r.Took)
		var failed []string
		for test, result := range results {
			if result.status == failedStatus {
				failed = append(failed, test)
			}
		}
		if len(failed) > 0 {
			slices.Sort(failed)
			return fmt.Errorf("failed:\n  %s", strings.Join(failed, "\n  "))
		}
		if p.err != nil {
			return fmt.Errorf("e2e.test (see %s): %w", log.Name(), p.err)
		}
		return nil
	})
}

// ending matches the line that Ginkgo prints when a test has ended. The next line is the
// test's name.
var ending = regexp.MustCompile(`^(•|S|P)? ?(\[(FAILED|SKIPPED|TIMEDOUT|PANICKED|INTERRUPTED)\] )?\[([0-9.]+) seconds\]$`)

// labels matches a test's labels, which Ginkgo adds to its name.
var labels = regexp.MustCompile(` \[sig-[^\[\]]*\]$`)

// printProgress prints a line for each test whose end Ginkgo's output reports.
func printProgress(w io.Writer, r io.Reader) {
	lines := bufio.NewReader(r)
	count := 0
	for last := []string(nil); ; {
		line, err := lines.ReadString('\n')
		line = strings.TrimSpace(line)
		switch m := ending.FindStringSubmatch(line); {
		case m != nil:
			last = m
		case last != nil && line != "":
			count++
			status := "ok"
			if last[3] != "" {
				status = strings.ToLower(last[3])
			}
			fmt.Fprintf(w, "%4d %-8s %6ss %s\n", count, status, last[4], labels.ReplaceAllString(line, ""))
			last = nil
		}
		if err != nil {
			return
		}
	}
}
