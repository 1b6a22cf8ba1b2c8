//go:build pins

package main

// e2e.test is a test binary, and go.mod's tool directives cannot name a test binary. This
// import makes "go mod tidy" require the binary's dependencies.
import _ "k8s.io/kubernetes/test/e2e"
