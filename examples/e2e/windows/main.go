//go:build linux

// Windows compares nodeproxy.exe with kube-proxy.exe by the calls that they make to Windows' Host
// Networking Service (HNS). Both run in Wine against a real kube-apiserver and package standin,
// which counts the calls. It needs Wine, PROXIER_KUBE_APISERVER and PROXIER_ETCD.
//
//	GOOS=windows go build -o nodeproxy.exe ./examples/nodeproxy
//	(cd examples/e2e/apiserver && GOWORK=off GOOS=windows go build -o kube-proxy.exe k8s.io/kubernetes/cmd/kube-proxy)
//	go run ./examples/e2e/windows -services 100,1000 nodeproxy.exe examples/e2e/apiserver/kube-proxy.exe
//
// Each Service has a cluster IP and two endpoints on other nodes. The network is of type L2Bridge.
// Times are of Wine and of the stand-in: a call of the real service takes longer.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/go-proxier/proxier/examples/internal/process"
	"github.com/go-proxier/proxier/examples/internal/standin"
)

func main() { process.Main("windows", run) }

func run(ctx context.Context) error {
	sizes := flag.String("services", "100,1000", "the numbers of Services, separated by commas")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "Usage: windows [flags] PROGRAM.exe ...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 {
		flag.Usage()
		return flag.ErrHelp
	}
	wine, err := standin.Find()
	if err != nil {
		return err
	}
	fmt.Print("| Services | step | program | calls | of these writes | load balancers missing | time |\n|---|---|---|---|---|---|---|\n")
	for _, size := range strings.Split(*sizes, ",") {
		n, err := strconv.Atoi(size)
		if err != nil {
			return err
		}
		for _, exe := range flag.Args() {
			if err := measure(ctx, wine, exe, n); err != nil {
				return fmt.Errorf("%s with %d Services: %w", filepath.Base(exe), n, err)
			}
		}
	}
	return nil
}

// measure starts a program, changes an endpoint, and restarts the program. It prints a row of the table for each
// step.
func measure(ctx context.Context, wine *standin.Wine, exe string, n int) error {
	dir, err := os.MkdirTemp("", "windows")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s, err := newSite(ctx, wine, dir)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.createServices(ctx, n); err != nil {
		return err
	}
	for _, step := range []struct {
		name string
		do   func() error
		done func() bool
	}{
		{"start", func() error { return s.startProxy(exe) }, func() bool { return s.loadBalancers() == n }},
		{"one endpoint replaced", func() error { return s.replaceEndpoint(ctx, 2) }, func() bool { return s.endpointReplaced(2) }},
		{"restart", func() error { s.proxy.Kill(); return s.startProxy(exe) }, func() bool { return s.loadBalancers() == n }},
	} {
		m, err := s.step(ctx, step.name, step.do, step.done)
		if err != nil {
			return err
		}
		program := strings.TrimSuffix(filepath.Base(exe), ".exe")
		fmt.Printf("| %d | %s | %s | %d | %d | %d | %v |\n", n, step.name, program, m.calls, m.writes, m.before-m.least, m.took().Round(10*time.Millisecond))
	}
	return nil
}
