//go:build !race

// The race detector finds a race within client-go 0.37 when it reads a certificate again:
// dynamicClientCert.loadClientCert writes what its worker reads.

package kubeapi

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/transport"
	componentbase "k8s.io/component-base/config/v1alpha1"

	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// client-go's goroutine that reads certificates reads this variable, and never ends.
func init() { transport.CertCallbackRefreshDuration = 50 * time.Millisecond }

// authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return a
}

// issue returns a certificate and its key as PEM.
func (a *authority) issue(name string, notAfter time.Time) (cert, key []byte) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: notAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, k.Public(), a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})
}

// rotating is an API server that has one Node, for clients with the right credentials.
type rotating struct {
	*httptest.Server
	dir    string
	token  atomic.Pointer[string]
	client *Client
}

// newRotating starts a server that requires a client certificate or a token. user is the user of
// the kubeconfig.
func newRotating(t *testing.T, a *authority, certificates bool, user string) *rotating {
	s := &rotating{dir: t.TempDir()}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if want := s.token.Load(); want != nil && r.Header.Get("Authorization") != "Bearer "+*want {
			w.WriteHeader(http.StatusUnauthorized)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":401,"reason":"Unauthorized"}`)
			return
		}
		fmt.Fprint(w, `{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1"}}`)
	}))
	cert, key := a.issue("server", time.Now().Add(time.Hour))
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: pool}
	if certificates {
		s.TLS.ClientAuth = tls.RequireAndVerifyClientCert
	}
	s.Config.ErrorLog = log.New(io.Discard, "", 0) // of refused certificates
	s.StartTLS()
	t.Cleanup(s.Close)
	s.write(t, "ca.crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}))
	s.write(t, "kubeconfig", fmt.Appendf(nil, `{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: %q, certificate-authority: ca.crt}}],
users: [{name: u, user: %s}], contexts: [{name: c, context: {cluster: c, user: u}}], current-context: c}`, s.URL, user))
	return s
}

func (s *rotating) write(t *testing.T, name string, text []byte) {
	t.Helper()
	file := filepath.Join(s.dir, name)
	if err := os.WriteFile(file+".new", text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
}

func (s *rotating) connect(t *testing.T) {
	t.Helper()
	c, err := ClientConfig(componentbase.ClientConnectionConfiguration{Kubeconfig: filepath.Join(s.dir, "kubeconfig"), QPS: 1000, Burst: 1000}, "")
	if err != nil {
		t.Fatal(err)
	}
	if s.client, err = NewClient(c); err != nil {
		t.Fatal(err)
	}
}

func (s *rotating) get(t *testing.T) error {
	_, err := s.client.Node(t.Context(), "n1")
	return err
}

// eventually waits until a request succeeds.
func (s *rotating) eventually(t *testing.T, limit time.Duration) {
	t.Helper()
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if err = s.get(t); err == nil {
			return
		}
	}
	t.Errorf("%v after the rotation: %v", limit, err)
}

// TestTokenFileIsReadAgain replaces the token file while the API server stops accepting the old
// token. client-go reads the file once a minute.
func TestTokenFileIsReadAgain(t *testing.T) {
	testtime.NeedThorough(t)
	t.Parallel()
	s := newRotating(t, newAuthority(t), false, "{tokenFile: token}")
	first, second := "first", "second"
	s.token.Store(&first)
	s.write(t, "token", []byte(first))
	s.connect(t)
	if err := s.get(t); err != nil {
		t.Fatal(err)
	}
	s.write(t, "token", []byte(second))
	s.token.Store(&second)
	s.eventually(t, 90*time.Second)
}

// TestCertificateFilesAreReadAgain replaces an expired client certificate. client-go reads the
// files once in five minutes, and more often here.
func TestCertificateFilesAreReadAgain(t *testing.T) {
	a := newAuthority(t)
	s := newRotating(t, a, true, "{client-certificate: client.crt, client-key: client.key}")
	put := func(notAfter time.Time) {
		cert, key := a.issue("node", notAfter)
		s.write(t, "client.crt", cert)
		s.write(t, "client.key", key)
	}
	put(time.Now().Add(-time.Hour))
	s.connect(t)
	if err := s.get(t); err == nil {
		t.Fatal("an expired certificate is accepted")
	}
	put(time.Now().Add(time.Hour))
	s.eventually(t, testtime.Timeout)
}
