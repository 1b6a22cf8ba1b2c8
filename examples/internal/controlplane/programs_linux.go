package controlplane

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
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

// Need returns the programs for a test. It skips the test if one is missing, as
// [netlab.Need] does.
func Need(tb testing.TB) Programs {
	tb.Helper()
	p, err := Find("", "")
	netlab.Need(tb, err == nil, fmt.Sprintf("a control plane: %v", err))
	return p
}
