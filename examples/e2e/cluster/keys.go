package main

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"
)

// authority signs the cluster's certificates.
type authority struct {
	certificate *x509.Certificate
	key         crypto.Signer
	serial      int64
}

// keys writes the cluster's authority, the API server's certificate, and certificates and
// kubeconfigs of its users. The authority's key also signs the tokens of ServiceAccounts.
func (p *plane) keys() error {
	ca := &authority{}
	if err := ca.issue(p.state("ca"), &x509.Certificate{
		Subject: pkix.Name{CommonName: "ca"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}); err != nil {
		return err
	}
	server := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "kube-apiserver"},
		IPAddresses: []net.IP{net.ParseIP(controlIP), net.ParseIP(apiServiceIP)},
		DNSNames:    []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc." + clusterDomain},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if err := ca.issue(p.state("apiserver"), server); err != nil {
		return err
	}
	users := map[string]pkix.Name{
		"admin":      {CommonName: "admin", Organization: []string{"system:masters"}},
		"kube-proxy": {CommonName: "system:kube-proxy"},
	}
	for n := 1; n <= p.Nodes; n++ {
		users[nodeName(n)] = pkix.Name{CommonName: "system:node:" + nodeName(n), Organization: []string{"system:nodes"}}
	}
	for file, subject := range users {
		if err := ca.issue(p.state(file), &x509.Certificate{Subject: subject, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
			return err
		}
		user := fmt.Sprintf("client-certificate: %s, client-key: %s", p.state(file+".crt"), p.state(file+".key"))
		if err := p.writeKubeconfig(file, user); err != nil {
			return err
		}
	}
	return nil
}

// writeKubeconfig writes a kubeconfig for processes inside the cluster. user is the content
// of the kubeconfig's field user.
func (s settings) writeKubeconfig(name, user string) error {
	inside := s.inside()
	return os.WriteFile(s.state(name+".conf"), fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: cluster, cluster: {server: "https://%s:6443", certificate-authority: %s}}]
users: [{name: user, user: {%s}}]
contexts: [{name: context, context: {cluster: cluster, user: user}}]
current-context: context
`, controlIP, inside.state("ca.crt"), user), 0o600)
}

// issue writes a new key and its certificate to path.key and path.crt. The first call
// issues the authority's own certificate.
func (a *authority) issue(path string, c *x509.Certificate) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	if a.key == nil {
		a.certificate, a.key = c, key
	}
	a.serial++
	c.SerialNumber = big.NewInt(a.serial)
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().AddDate(1, 0, 0)
	c.KeyUsage |= x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, c, a.certificate, key.Public(), a.key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".key", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600); err != nil {
		return err
	}
	return os.WriteFile(path+".crt", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644)
}
