// Package controlplane runs a real kube-apiserver with a real etcd in a network namespace,
// for tests and benchmarks:
//
//	s := controlplane.New(t, controlplane.Config{Host: host, Address: "10.0.0.2"})
//	answer, err := s.Request(ctx, "GET", "/api/v1/namespaces", nil)
//
// The API server authorizes by Node and RBAC, authenticates by tokens, and makes its own
// certificate, which clients do not check. It runs on Linux only.
package controlplane
