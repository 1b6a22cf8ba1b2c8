package controlplane

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// The environment variables that hold the paths of the programs.
// examples/e2e/apiserver builds both.
const (
	APIServerEnv = "PROXIER_KUBE_APISERVER"
	EtcdEnv      = "PROXIER_ETCD"
)

// Programs holds the paths of a control plane's two programs.
type Programs struct{ APIServer, Etcd string }

// Find looks for the programs. An empty path stands for that in the program's environment
// variable, or else for the program's usual name. A name without a slash is searched in PATH.
//
// etcd before 3.4.31 and 3.5.13 is too old for clients to receive lists as streams
// (k8s.io/apiserver, feature RequestWatchProgress). Agents then need more memory.
func Find(apiserver, etcd string) (p Programs, err error) {
	for _, f := range []struct {
		to              *string
		path, env, name string
	}{
		{&p.APIServer, apiserver, APIServerEnv, "kube-apiserver"},
		{&p.Etcd, etcd, EtcdEnv, "etcd"},
	} {
		path := cmp.Or(f.path, os.Getenv(f.env), f.name)
		if *f.to, err = exec.LookPath(path); err != nil {
			return p, fmt.Errorf("%w (build it in examples/e2e/apiserver; %s names it)", err, f.env)
		}
	}
	return p, nil
}

// New starts a control plane for a test, which it ends with, and waits until the API server has made its
// own namespaces. It sets Config's Programs, Dir and ServiceRanges, and shows the end of the logs if the
// test fails. It skips the test as [Need] does.
func New(tb testing.TB, c Config) *Server {
	tb.Helper()
	var etcd, apiserver Tail
	c.Programs, c.Dir, c.ServiceRanges, c.EtcdLog, c.APIServerLog = Need(tb), tb.TempDir(), "10.96.0.0/16", &etcd, &apiserver
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("end of etcd's log:\n%s\nend of kube-apiserver's log:\n%s", etcd.String(), apiserver.String())
		}
	})
	s, err := Start(tb.Context(), c)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	for _, namespace := range []string{"default", "kube-system"} {
		if err := s.WaitFor(tb.Context(), "/api/v1/namespaces/"+namespace); err != nil {
			tb.Fatal(err)
		}
	}
	return s
}

// Tail holds the last 4,000 bytes that were written to it.
type Tail struct {
	mu sync.Mutex
	b  []byte
}

// Write implements [io.Writer].
func (l *Tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p...)
	if n := len(l.b) - 4000; n > 0 {
		l.b = l.b[n:]
	}
	return len(p), nil
}

func (l *Tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.b)
}

// Need returns the programs for a test. It skips the test if one is missing, as
// [netlab.Need] does.
func Need(tb testing.TB) Programs {
	tb.Helper()
	p, err := Find("", "")
	netlab.Need(tb, err == nil, fmt.Sprintf("a control plane: %v", err))
	return p
}
