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
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/util/keyutil"

	"github.com/go-proxier/proxier/examples/internal/process"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Config describes a control plane. Host, Address and Dir are required.
type Config struct {
	// Host runs both programs and has Address. etcd listens on the host's 127.0.0.1, so
	// a host can run one control plane at a time.
	Host    *netlab.Host
	Address string
	// Dir is an existing folder for keys, certificates, the kubeconfig, logs and etcd's data.
	Dir string
	// User is the user of Kubeconfig; an administrator if empty.
	User string
	// APIServerFlags are added to the flags that Start gives the API server.
	APIServerFlags []string
}

// Server is a running control plane. Its methods may be called concurrently, except Kill,
// Run and Close.
type Server struct {
	config     Config
	apiserver  string // the path of the program
	http       *http.Client
	etcd, kube *process.Process // nil unless started
}

const (
	port       = "6443"
	adminToken = "admin-token"
	// UserToken is the token of Config.User.
	UserToken = "user-token"
	// readyTimeout bounds each wait. A slow machine takes minutes to start the API server.
	readyTimeout = 5 * time.Minute
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

// Start starts both programs and waits until the API server is ready. The caller must
// call Close.
func Start(ctx context.Context, c Config) (_ *Server, err error) {
	s := &Server{config: c}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	s.http = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
			return c.Host.Dial(ctx, network, "", to)
		},
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // the server made its certificate itself
		ForceAttemptHTTP2: true,
	}}
	var etcd string
	if s.apiserver, etcd, err = Find(); err != nil {
		return nil, err
	}
	if err := s.writeFiles(); err != nil {
		return nil, err
	}
	s.etcd, err = process.Start(c.Host, exec.Command(etcd,
		"--data-dir", s.path("etcd"), "--unsafe-no-fsync", "--quota-backend-bytes", "8000000000",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380",
	), s.path("etcd.log"))
	if err != nil {
		return nil, err
	}
	return s, s.Run(ctx)
}

// writeFiles writes the key for ServiceAccounts, the tokens and the kubeconfig.
func (s *Server) writeFiles() error {
	key, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return err
	}
	tokens, token := adminToken+",admin,1,system:masters\n", adminToken
	if s.config.User != "" {
		tokens += UserToken + "," + s.config.User + ",2\n"
		token = UserToken
	}
	return errors.Join(
		os.WriteFile(s.path("sa.key"), key, 0o600),
		os.WriteFile(s.path("tokens.csv"), []byte(tokens), 0o600),
		os.WriteFile(s.Kubeconfig(), fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, net.JoinHostPort(s.config.Address, port), token), 0o600))
}

// path returns the path of a file in the control plane's folder.
func (s *Server) path(name string) string { return filepath.Join(s.config.Dir, name) }

// Kubeconfig returns the path of a kubeconfig for Config.User.
func (s *Server) Kubeconfig() string { return s.path("kubeconfig") }

// Certificate returns the path of the certificate that the API server made for itself.
func (s *Server) Certificate() string { return s.path("certs/apiserver.crt") }

// Run starts the API server again after Kill and waits until it is ready.
func (s *Server) Run(ctx context.Context) (err error) {
	c := &s.config
	s.kube, err = process.Start(c.Host, exec.Command(s.apiserver, append([]string{
		"--etcd-servers", "http://127.0.0.1:2379", "--bind-address", c.Address, "--advertise-address", c.Address, "--secure-port", port,
		"--cert-dir", s.path("certs"), "--token-auth-file", s.path("tokens.csv"),
		"--authorization-mode", "Node,RBAC", "--disable-admission-plugins", "ServiceAccount", "--allow-privileged",
		"--service-cluster-ip-range", "10.96.0.0/12", "--service-account-issuer", "https://cluster.test",
		"--service-account-key-file", s.path("sa.key"), "--service-account-signing-key-file", s.path("sa.key"),
	}, c.APIServerFlags...)...), s.path("kube-apiserver.log"))
	if err != nil {
		return err
	}
	return s.WaitFor(ctx, "/readyz")
}

// WaitFor waits until the API server answers a GET request for a path with success: an
// API server makes its own namespaces and objects some time after it is ready. It
// returns the last request's error after five minutes or when ctx ends.
func (s *Server) WaitFor(ctx context.Context, path string) error {
	for end := time.Now().Add(readyTimeout); ; time.Sleep(50 * time.Millisecond) {
		_, err := s.Request(ctx, http.MethodGet, path, nil)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || time.Now().After(end) {
			return fmt.Errorf("the API server is not ready: %w", err)
		}
	}
}

// Request sends a request as an administrator and returns the answer. The body is JSON; a
// PATCH request's is a JSON merge patch. Any status of 300 or more is an error that
// holds the answer.
func (s *Server) Request(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	kind := "application/json"
	if method == http.MethodPatch {
		kind = "application/merge-patch+json"
	}
	return s.send(ctx, method, path, kind, body)
}

// Apply creates or changes the object at a path, as "kubectl apply --server-side --force-conflicts"
// does, and returns the answer. The body is YAML. The API server rejects fields that it does not know.
func (s *Server) Apply(ctx context.Context, path string, body []byte) ([]byte, error) {
	return s.send(ctx, http.MethodPatch, path+"?fieldManager=kubectl&force=true&fieldValidation=Strict", "application/apply-patch+yaml", body)
}

func (s *Server) send(ctx context.Context, method, path, kind string, body []byte) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, "https://"+net.JoinHostPort(s.config.Address, port)+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Authorization", "Bearer "+adminToken)
	r.Header.Set("Content-Type", kind)
	resp, err := s.http.Do(r)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	case resp.StatusCode >= 300:
		return nil, fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, answer)
	}
	return answer, nil
}

// Kill kills the API server. etcd keeps running.
func (s *Server) Kill() { s.kube.Kill() }

// Close kills both programs.
func (s *Server) Close() {
	s.kube.Kill()
	s.etcd.Kill()
}
