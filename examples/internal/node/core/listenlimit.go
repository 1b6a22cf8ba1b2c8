package core

import (
	"context"
	"fmt"
	"net"
	"sync"

	"github.com/go-proxier/proxier/examples/internal/node/modes"
)

// listenWithin returns a function that opens the health-check node ports of Services within the limit
// of listening sockets, for [health.NodePortsConfig].Listen.
func listenWithin(l *modes.Limits, listen func(ctx context.Context, network, address string) (net.Listener, error)) func(ctx context.Context, network, address string) (net.Listener, error) {
	return func(ctx context.Context, network, address string) (net.Listener, error) {
		if !l.Take() {
			return nil, fmt.Errorf("%d ports are open, which RLIMIT_NOFILE allows", l.Sockets)
		}
		inner, err := listen(ctx, network, address)
		if err != nil {
			l.Give()
			return nil, err
		}
		return &countedListener{Listener: inner, give: sync.OnceFunc(l.Give)}, nil
	}
}

// countedListener counts as open until it is closed.
type countedListener struct {
	net.Listener
	give func()
}

func (c *countedListener) Close() error {
	c.give()
	return c.Listener.Close()
}
