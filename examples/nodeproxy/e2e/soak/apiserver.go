//go:build linux

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
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/go-proxier/proxier/internal/netlab"
)

// apiServer is the source that is a real API server with a real etcd, on a host of its own.
type apiServer struct {
	host       *netlab.Host
	bin, dir   string
	kubeconfig string
	http       *http.Client
	etcd, kube *exec.Cmd
	log        *os.File
}

const (
	apiToken = "soak-token"
	// apiWriters is how many requests are made at a time.
	apiWriters = 16
	// apiTimeout is how long an API server may take to be ready, or to accept an object.
	apiTimeout = 3 * time.Minute
)

func newAPIServer(ctx context.Context, h *netlab.Host, bin, dir string) (_ *apiServer, err error) {
	etcd, err := exec.LookPath("etcd")
	if err != nil {
		return nil, fmt.Errorf("an API server needs etcd: %w", err)
	}
	s := &apiServer{host: h, bin: bin, dir: dir, kubeconfig: filepath.Join(dir, "kubeconfig")}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	s.http = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
			return h.Dial(ctx, network, "", to)
		},
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true}, // a certificate that the server makes for itself
		MaxIdleConnsPerHost: apiWriters,
	}}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	if s.log, err = os.Create(filepath.Join(dir, "apiserver.log")); err != nil {
		return nil, err
	}
	err = errors.Join(
		os.WriteFile(filepath.Join(dir, "sa.key"), pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}), 0o600),
		os.WriteFile(filepath.Join(dir, "tokens.csv"), []byte(apiToken+",admin,1,system:masters\n"), 0o600),
		os.WriteFile(s.kubeconfig, fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s:6443", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, controlAddr, apiToken), 0o600))
	if err != nil {
		return nil, err
	}
	if s.etcd, err = s.start(etcd, "--data-dir", filepath.Join(dir, "etcd"), "--unsafe-no-fsync", "--quota-backend-bytes", "8000000000",
		"--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380"); err != nil {
		return nil, err
	}
	if err := s.up(ctx); err != nil {
		return nil, err
	}
	if err := s.ask(ctx, "POST", "/api/v1/nodes", []byte(nodeObject)); err != nil {
		return nil, err
	}
	// The API server makes a Service for itself, and a slice for it a while later.
	return s, s.persist(ctx, func() error {
		return s.ask(ctx, "GET", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes", nil)
	})
}

// start starts a process on the host.
func (s *apiServer) start(bin string, args ...string) (*exec.Cmd, error) {
	cmd := exec.Command(bin, args...)
	cmd.Stdout, cmd.Stderr = s.log, s.log
	return cmd, s.host.Start(cmd)
}

// up starts the API server and waits until it is ready.
func (s *apiServer) up(ctx context.Context) (err error) {
	if s.kube, err = s.start(s.bin,
		"--etcd-servers", "http://127.0.0.1:2379", "--bind-address", controlAddr, "--advertise-address", controlAddr, "--secure-port", "6443",
		"--cert-dir", filepath.Join(s.dir, "certs"), "--token-auth-file", filepath.Join(s.dir, "tokens.csv"),
		"--authorization-mode", "RBAC", "--disable-admission-plugins", "ServiceAccount",
		"--service-cluster-ip-range", serviceCIDRs[0]+","+serviceCIDRs[1], "--service-account-issuer", "https://cluster.test",
		"--service-node-port-range", fmt.Sprintf("%d-%d", firstNodePort, lastNodePort),
		"--service-account-key-file", filepath.Join(s.dir, "sa.key"), "--service-account-signing-key-file", filepath.Join(s.dir, "sa.key")); err != nil {
		return err
	}
	return s.persist(ctx, func() error { return s.ask(ctx, "GET", "/readyz", nil) })
}

// persist calls f until it succeeds.
func (s *apiServer) persist(ctx context.Context, f func() error) error {
	for end := time.Now().Add(apiTimeout); ; sleep(ctx, 100*time.Millisecond) {
		err := f()
		if err == nil || ctx.Err() != nil || time.Now().After(end) {
			return err
		}
	}
}

// ask sends a request.
func (s *apiServer) ask(ctx context.Context, method, path string, body []byte) error {
	r, err := http.NewRequestWithContext(ctx, method, "https://"+controlAddr+":6443"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Authorization", "Bearer "+apiToken)
	r.Header.Set("Content-Type", "application/json")
	resp, err := s.http.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case method == "DELETE" && resp.StatusCode == http.StatusNotFound:
		return nil // the answer to the first request was lost
	case resp.StatusCode >= 300:
		return fmt.Errorf("%s %s: %s: %.500s", method, path, resp.Status, out)
	}
	return nil
}

func (s *apiServer) args() []string {
	return []string{"--kubeconfig", s.kubeconfig, "--kube-api-qps", "50", "--kube-api-burst", "100"}
}

const (
	servicesPath = "/api/v1/namespaces/" + namespace + "/services"
	slicesPath   = "/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices"
)

// write sends the objects of each Service in order, several Services at a time.
func (s *apiServer) write(ctx context.Context, changes []change) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	limit := make(chan struct{}, apiWriters)
	for _, c := range changes {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			if err := s.writeOne(ctx, c); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs[:min(len(errs), 5)]...)
}

func (s *apiServer) writeOne(ctx context.Context, c change) error {
	had := map[string][]byte{}
	if c.old != nil {
		had["service"] = encoded(c.old.object())
		for _, es := range c.old.slices() {
			had[es.Name] = encoded(es)
		}
	}
	if c.now != nil {
		o := c.now.object()
		text := encoded(o)
		if !bytes.Equal(text, had["service"]) {
			if err := s.put(ctx, servicesPath, o.Name, c.old != nil, text); err != nil {
				return err
			}
			if len(o.Status.LoadBalancer.Ingress) != 0 {
				if err := s.persist(ctx, func() error { return s.ask(ctx, "PUT", servicesPath+"/"+o.Name+"/status", text) }); err != nil {
					return err
				}
			}
		}
		for _, es := range c.now.slices() {
			text := encoded(es)
			if before, ok := had[es.Name]; !bytes.Equal(text, before) {
				if err := s.put(ctx, slicesPath, es.Name, ok, text); err != nil {
					return err
				}
			}
			delete(had, es.Name)
		}
	}
	for name := range had {
		path := slicesPath + "/" + name
		if name == "service" {
			if c.now != nil {
				continue
			}
			path = servicesPath + "/" + c.old.name()
		}
		if err := s.persist(ctx, func() error { return s.ask(ctx, "DELETE", path, nil) }); err != nil {
			return err
		}
	}
	return nil
}

// put creates or replaces an object. An API server that was killed may have done it.
func (s *apiServer) put(ctx context.Context, path, name string, exists bool, text []byte) error {
	return s.persist(ctx, func() error {
		if exists {
			return s.ask(ctx, "PUT", path+"/"+name, text)
		}
		err := s.ask(ctx, "POST", path, text)
		if err != nil && s.ask(ctx, "GET", path+"/"+name, nil) == nil {
			return nil
		}
		return err
	})
}

func encoded(o runtime.Object) []byte {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // there is nothing in it that cannot be encoded
	}
	return text
}

// interrupt kills the API server and starts it again.
func (s *apiServer) interrupt(ctx context.Context, d time.Duration) error {
	s.kill(s.kube)
	sleep(ctx, d)
	return s.up(ctx)
}

func (s *apiServer) kill(cmd *exec.Cmd) {
	if cmd != nil && cmd.Process != nil {
		cmd.Process.Kill()
		cmd.Wait()
	}
}

func (s *apiServer) close() {
	s.kill(s.kube)
	s.kill(s.etcd)
	if s.log != nil {
		s.log.Close()
	}
}
