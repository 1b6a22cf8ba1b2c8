package main

import (
	"crypto/x509"
	"fmt"
	"net"
	"os"

	"k8s.io/client-go/util/cert"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"
)

// keys writes the cluster's authority, the API server's certificate, and certificates and
// kubeconfigs of its users. The authority's key also signs the tokens of ServiceAccounts.
func (p *plane) keys() error {
	ca, caKey, err := pkiutil.NewCertificateAuthority(&pkiutil.CertConfig{Config: cert.Config{CommonName: "ca"}})
	if err != nil {
		return err
	}
	if err := pkiutil.WriteCertAndKey(p.state(), "ca", ca, caKey); err != nil {
		return err
	}
	issue := func(name string, c cert.Config) error {
		crt, key, err := pkiutil.NewCertAndKey(ca, caKey, &pkiutil.CertConfig{Config: c})
		if err != nil {
			return err
		}
		return pkiutil.WriteCertAndKey(p.state(), name, crt, key)
	}
	if err := issue("apiserver", cert.Config{
		CommonName: "kube-apiserver", Usages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		AltNames: cert.AltNames{
			IPs:      []net.IP{net.ParseIP(controlIP), net.ParseIP(apiServiceIP)},
			DNSNames: []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc." + clusterDomain},
		},
	}); err != nil {
		return err
	}
	users := map[string]cert.Config{
		"admin":      {CommonName: "admin", Organization: []string{"system:masters"}},
		"kube-proxy": {CommonName: "system:kube-proxy"},
	}
	for n := 1; n <= p.Nodes; n++ {
		users[nodeName(n)] = cert.Config{CommonName: "system:node:" + nodeName(n), Organization: []string{"system:nodes"}}
	}
	for name, c := range users {
		c.Usages = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		if err := issue(name, c); err != nil {
			return err
		}
		if err := p.writeKubeconfig(name, fmt.Sprintf("client-certificate: %s, client-key: %s", p.state(name+".crt"), p.state(name+".key"))); err != nil {
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
