package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/go-proxier/proxier/internal/netlab"
)

// apiserverEnv is the variable with the path of kube-apiserver. See e2e/apiserver.
const apiserverEnv = "PROXIER_KUBE_APISERVER"

// cluster is a real API server with a real etcd, on their own host.
type cluster struct {
	t          *testing.T
	host       *netlab.Host
	bin, dir   string
	addr       string // the address of the API server
	http       *http.Client
	server     *exec.Cmd
	kubeconfig string // the file for the agent
}

// The tokens of the cluster's two users.
const (
	adminToken = "admin-token"
	proxyToken = "proxy-token"
)

// newCluster starts a cluster on a host with an address, or skips the test.
func newCluster(t *testing.T, h *netlab.Host, addr string) *cluster {
	t.Helper()
	bin := os.Getenv(apiserverEnv)
	if bin == "" {
		bin, _ = exec.LookPath("kube-apiserver")
	}
	netlab.Need(t, bin != "", "kube-apiserver, named by "+apiserverEnv+" (build it in examples/nodeproxy/e2e/apiserver)")
	etcd, err := exec.LookPath("etcd")
	netlab.Need(t, err == nil, "etcd")
	c := &cluster{t: t, host: h, bin: bin, dir: t.TempDir(), addr: net.JoinHostPort(addr, "6443")}
	c.http = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
			return h.Dial(ctx, network, "", to)
		},
		// The server's certificate is self-signed.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	c.write("sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})))
	c.write("tokens.csv", adminToken+",admin,1,system:masters\n"+proxyToken+",system:serviceaccount:kube-system:nodeproxy,2\n")
	c.kubeconfig = c.write("kubeconfig", fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, c.addr, proxyToken))
	c.start("etcd", etcd, "--data-dir", filepath.Join(c.dir, "etcd"), "--listen-client-urls", "http://127.0.0.1:2379",
		"--advertise-client-urls", "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380")
	c.up()
	return c
}

// write writes a file in the cluster's folder and returns its path.
func (c *cluster) write(name, text string) string {
	c.t.Helper()
	path := filepath.Join(c.dir, name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return path
}

// start starts a process of the cluster. At the end of the test it kills the process, and
// shows its log if the test failed.
func (c *cluster) start(name, bin string, args ...string) *exec.Cmd {
	c.t.Helper()
	var log tail
	cmd := exec.Command(bin, args...)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := c.host.Start(cmd); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if c.t.Failed() {
			c.t.Logf("the end of the log of %s:\n%s", name, log.String())
		}
	})
	return cmd
}

// tail is a writer that keeps the end of what is written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (l *tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = append(l.b, p...)
	if n := len(l.b) - 4000; n > 0 {
		l.b = l.b[n:]
	}
	return len(p), nil
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.b)
}

// up starts the API server and waits until it is ready.
func (c *cluster) up() {
	c.t.Helper()
	host, port, _ := net.SplitHostPort(c.addr)
	c.server = c.start("kube-apiserver", c.bin,
		"--etcd-servers", "http://127.0.0.1:2379", "--bind-address", host, "--advertise-address", host, "--secure-port", port,
		"--cert-dir", filepath.Join(c.dir, "certs"), "--token-auth-file", filepath.Join(c.dir, "tokens.csv"),
		"--authorization-mode", "RBAC", "--allow-privileged", "--disable-admission-plugins", "ServiceAccount",
		"--service-cluster-ip-range", "10.96.0.0/16", "--service-account-issuer", "https://cluster.test",
		"--service-account-key-file", filepath.Join(c.dir, "sa.key"), "--service-account-signing-key-file", filepath.Join(c.dir, "sa.key"))
	var last error
	for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, last = c.ask("GET", "/readyz", "", nil); last == nil {
			return
		}
	}
	c.t.Fatalf("the API server is not ready in time: %v", last)
}

// down kills the API server.
func (c *cluster) down() {
	c.server.Process.Kill()
	c.server.Wait()
}

// ask sends a request as the cluster's administrator.
func (c *cluster) ask(method, path, contentType string, body []byte) ([]byte, error) {
	r, err := http.NewRequestWithContext(c.t.Context(), method, "https://"+c.addr+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Authorization", "Bearer "+adminToken)
	r.Header.Set("Content-Type", contentType)
	resp, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, out)
	}
	return out, err
}

// do sends a request that must succeed. The body is YAML. Unless out is nil, do decodes the
// answer into it.
func (c *cluster) do(method, path, body string, out any) {
	c.t.Helper()
	contentType := "application/json"
	if method == "PATCH" {
		contentType = "application/merge-patch+json"
	}
	var text []byte
	if body != "" {
		var v any
		if err := yaml.Unmarshal([]byte(body), &v); err != nil {
			c.t.Fatal(err)
		}
		var err error
		if text, err = json.Marshal(v); err != nil {
			c.t.Fatal(err)
		}
	}
	answer, err := c.ask(method, path, contentType, text)
	if err != nil {
		c.t.Fatal(err)
	}
	if out != nil {
		if err := json.Unmarshal(answer, out); err != nil {
			c.t.Fatalf("%s: %v", answer, err)
		}
	}
}

// validate sends every object of a file to the API server for a dry run, with strict
// validation of fields.
func (c *cluster) validate(file string) {
	c.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		c.t.Fatal(err)
	}
	n := 0
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var o struct{ Kind string }
		if err := yaml.Unmarshal([]byte(doc), &o); err != nil {
			c.t.Fatal(err)
		}
		path := map[string]string{
			"ServiceAccount":     "/api/v1/namespaces/kube-system/serviceaccounts",
			"ConfigMap":          "/api/v1/namespaces/kube-system/configmaps",
			"Service":            "/api/v1/namespaces/kube-system/services",
			"DaemonSet":          "/apis/apps/v1/namespaces/kube-system/daemonsets",
			"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
			"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
		}[o.Kind]
		if path == "" {
			c.t.Errorf("%s: unexpected kind %q", file, o.Kind)
			continue
		}
		c.do("POST", path+"?dryRun=All&fieldValidation=Strict", doc, nil)
		n++
	}
	if n < 2 {
		c.t.Errorf("%s: only %d objects", file, n)
	}
}

// apply creates the cluster-wide objects of a file with several documents.
func (c *cluster) apply(file string) {
	c.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		c.t.Fatal(err)
	}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		for kind, path := range map[string]string{
			"ClusterRole":        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
			"ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
		} {
			if strings.Contains(doc, "\nkind: "+kind+"\nmetadata") {
				c.do("POST", path, doc, nil)
			}
		}
	}
}
