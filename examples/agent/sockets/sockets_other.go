//go:build !linux

package sockets

import (
	"context"

	"github.com/go-proxier/proxier/examples/agent"
)

// LB returns the zero value: only Linux has the data plane.
func LB() agent.SocketLB { return agent.SocketLB{} }

// Cleanup does nothing.
func Cleanup(context.Context) error { return nil }
