package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/onsi/ginkgo/v2/types"
	"golang.org/x/sys/unix"
)

// test runs upstream's tests. The run's folder gets the output, Ginkgo's report, and the results as a table.
func test(ctx context.Context, o options, mode, focus string) error {
	return withProxy(ctx, o, mode, func(ctx context.Context, s settings) error {
		// Ginkgo gets time to report what the timeout interrupted.
		ctx, cancel := context.WithTimeout(ctx, o.timeout+time.Minute)
		defer cancel()
		skip := unsupported()
		fmt.Println("leaving out", skip)
		dir := filepath.Join(s.Dir, "runs", fmt.Sprintf("%s-%s-%s", o.proxy, mode, time.Now().Format("20060102-150405")))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		log, err := os.Create(filepath.Join(dir, "log"))
		if err != nil {
			return err
		}
		defer log.Close()
		// Everything that the tests started ends with Ginkgo.
		cmd := s.command(ctx, "control", "unshare", "--pid", "--fork", "--kill-child",
			"ginkgo", "run", "--no-color", "--keep-going", "--output-interceptor-mode=none",
			fmt.Sprintf("--procs=%d", o.procs), "--timeout="+o.timeout.String(),
			"--focus="+focus, "--skip="+skip, "--output-dir="+dir, "--json-report=report.json", s.bin("e2e.test"), "--",
			"--kubeconfig="+s.state("admin.conf"), "--provider=skeleton", fmt.Sprintf("--num-nodes=%d", s.Nodes),
			"--kubectl-path="+s.bin("kubectl"), "--dump-logs-on-failure=false", "--allowed-not-ready-nodes=0", "--node-os-distro=custom",
		)
		cmd.Stdout = io.MultiWriter(os.Stdout, log)
		cmd.Stderr = cmd.Stdout
		fmt.Printf("running tests; results are in %s\n", dir)
		ended := cmd.Run()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		report, err := os.ReadFile(filepath.Join(dir, "report.json"))
		var reports []types.Report
		if err := errors.Join(err, json.Unmarshal(report, &reports)); err != nil {
			return fmt.Errorf("cannot read the tests' report (see %s): %w", log.Name(), err)
		}
		r := results{}
		r.addReports(fmt.Sprintf("Kubernetes %s %s %s", s.Version, o.proxy, mode), reports)
		file, err := os.Create(filepath.Join(dir, "results.csv"))
		if err != nil {
			return err
		}
		defer file.Close()
		if err := errors.Join(r.write(file), r.summary(os.Stdout)); err != nil {
			return err
		}
		if ended != nil {
			return fmt.Errorf("tests failed (see %s): %w", log.Name(), ended)
		}
		return nil
	})
}

// unsupported returns an expression that matches the names of tests that cannot run in a cluster on this
// machine.
func unsupported() string {
	skip := []string{
		`Feature:Networking-(IPv4|IPv6|DNS)`,                 // no internet
		`Disruptive`,                                         // no SSH to nodes, and the proxy does not run in a pod
		`DNS configMap nameserver`,                           // CoreDNS does not run in a pod, and has no ConfigMap
		`Feature:PerformanceDNS`,                             // a test of DNS alone, with 10,000 Services
		`Networking IPerf2`,                                  // Debian's iperf prints fewer columns than the test expects
		`LocalhostNodePorts should let a node pull an image`, // the agnhost that is built here has no image for its registry
		`Netpol (NetworkPolicy|\[LinuxOnly\]|\[Feature)`,     // CNI plugin ptp has no network policies
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	if err != nil {
		return strings.Join(append(skip, `Feature:SCTPConnectivity`), "|") // the kernel has no SCTP
	}
	unix.Close(fd)
	return strings.Join(skip, "|")
}
