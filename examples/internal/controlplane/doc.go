// Package controlplane runs a real kube-apiserver with a real etcd in a network namespace,
// for tests and benchmarks:
//
//	s, err := controlplane.Start(ctx, controlplane.Config{
//		Host: host, Address: "10.0.0.2", Programs: programs, Dir: dir, ServiceRanges: "10.96.0.0/16",
//	})
//	defer s.Close()
//	answer, err := s.Request(ctx, "GET", "/api/v1/namespaces", nil)
//
// The API server authorizes by Node and RBAC, authenticates by tokens, and makes its own
// certificate, which clients do not check. It runs on Linux only.
package controlplane
