//go:build pins

package main

// e2e.test is a test binary, which go.mod's tool directives cannot name. This import makes
// "go mod tidy" require what it is built from.
import _ "k8s.io/kubernetes/test/e2e"
