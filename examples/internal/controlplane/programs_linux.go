// Package controlplane runs a real kube-apiserver with a real etcd in a network namespace,
// for tests and benchmarks:
//
//	s := controlplane.New(t, controlplane.Config{Host: host, Address: "10.0.0.2"})
//	answer, err := s.Request(ctx, "GET", "/api/v1/namespaces", nil)
//
// PROXIER_KUBE_APISERVER and PROXIER_ETCD hold the paths of the programs, which are otherwise searched in
// PATH; examples/e2e/apiserver builds both. etcd before 3.4.31 and 3.5.13 is too old for clients to receive
// lists as streams (k8s.io/apiserver, feature RequestWatchProgress). Agents then need more memory.
//
// The API server authorizes by Node and RBAC, authenticates by tokens, and makes its own
// certificate, which clients do not check. It runs on Linux only.
package controlplane

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Find returns the absolute paths of kube-apiserver and etcd.
func Find() (apiserver, etcd string, err error) {
	find := func(env, name string) string {
		path, e := exec.LookPath(cmp.Or(os.Getenv(env), name))
		if e != nil {
			err = fmt.Errorf("%w (build it in examples/e2e/apiserver; %s names it)", e, env)
		}
		return path
	}
	apiserver, etcd = find("PROXIER_KUBE_APISERVER", "kube-apiserver"), find("PROXIER_ETCD", "etcd")
	return apiserver, etcd, err
}

// Need skips the test if a program is missing, as [netlab.Need] does.
func Need(tb testing.TB) {
	tb.Helper()
	_, _, err := Find()
	netlab.Need(tb, err == nil, fmt.Sprintf("a control plane: %v", err))
}

// New starts a control plane for a test, which it ends with, and waits until the API server has made its
// own namespaces. It sets Config's Dir, and shows the end of the logs if the test fails. It skips the test
// as [Need] does.
func New(tb testing.TB, c Config) *Server {
	tb.Helper()
	Need(tb)
	c.Dir = tb.TempDir()
	s, err := Start(tb.Context(), c)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		s.Close()
		for _, name := range []string{"etcd", "kube-apiserver"} {
			if text, _ := os.ReadFile(s.path(name + ".log")); tb.Failed() {
				tb.Logf("end of %s's log:\n%s", name, text[max(0, len(text)-4000):])
			}
		}
	})
	for _, namespace := range []string{"default", "kube-system"} {
		if err := s.WaitFor(tb.Context(), "/api/v1/namespaces/"+namespace); err != nil {
			tb.Fatal(err)
		}
	}
	return s
}
