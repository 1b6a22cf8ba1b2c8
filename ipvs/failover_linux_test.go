package ipvs

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
)

// TestFailover passes connections between two nodes with one external IP. A node has the address
// only while it has an endpoint, so open connections end when that changes.
func TestFailover(t *testing.T) {
	if inMachine(t) {
		backendtest.Failover(t, newForWorld, backendtest.FailoverOptions{Ends: true})
	}
}
