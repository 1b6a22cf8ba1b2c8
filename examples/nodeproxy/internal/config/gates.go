package config

import (
	_ "embed"
	"strings"
)

// Kubernetes is the newest release that the agent was compared with. Documents that name
// what kube-proxy does name this release, which a test checks. Update the list of feature
// gates with it.
const Kubernetes = "1.37"

// gateNames has a name in each line, in byte order. Lines with # are comments.
//
//go:embed gates.txt
var gateNames string

// isKnownGate reports whether Kubernetes has had a feature gate in any release up to
// [Kubernetes]. Most gates that were removed before 1.20 are missing: no supported release
// accepts them.
func isKnownGate(gate string) bool {
	for line := range strings.Lines(gateNames) {
		if strings.TrimSpace(line) == gate && !strings.HasPrefix(gate, "#") {
			return true
		}
	}
	return false
}
