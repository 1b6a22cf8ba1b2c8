package nftables

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
)

// TestFailover passes connections between two nodes with one external IP.
func TestFailover(t *testing.T) { backendtest.Failover(t, newForWorld, backendtest.FailoverOptions{}) }
