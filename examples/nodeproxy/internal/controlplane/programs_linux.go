package controlplane

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
)

// Env names the environment variable that holds the path of a kube-apiserver.
// examples/nodeproxy/e2e/apiserver builds one.
const Env = "PROXIER_KUBE_APISERVER"

// Programs holds the paths of a control plane's two programs.
type Programs struct{ APIServer, Etcd string }

// Find looks for the programs. An empty path stands for the program's usual name, and
// a name without a slash is searched in PATH.
func Find(apiserver, etcd string) (p Programs, err error) {
	for _, f := range []struct {
		to                 *string
		path, name, advice string
	}{
		{&p.APIServer, apiserver, "kube-apiserver", "build it in examples/nodeproxy/e2e/apiserver"},
		{&p.Etcd, etcd, "etcd", "apt-get install etcd-server"},
	} {
		if f.path == "" {
			f.path = f.name
		}
		if *f.to, err = exec.LookPath(f.path); err != nil {
			return p, fmt.Errorf("%w (%s)", err, f.advice)
		}
	}
	return p, nil
}

// Need returns the programs for a test: the kube-apiserver that [Env] names, or else the
// one in PATH, and the etcd in PATH. It skips the test if one is missing, as [netlab.Need] does.
func Need(tb testing.TB) Programs {
	tb.Helper()
	p, err := Find(os.Getenv(Env), "")
	netlab.Need(tb, err == nil, fmt.Sprintf("a control plane (%s names a kube-apiserver): %v", Env, err))
	return p
}
