package agent

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/modes"
)

// listenLimit opens the health-check node ports of Services and bounds their number, so that they
// leave file descriptors for the kernel's sockets, the API server and the agent's own servers.
type listenLimit struct {
	max  int64
	open atomic.Int64
}

// defaultListeners is the limit if the process has no limit of open files: two for each of the
// 2,768 NodePorts that an API server assigns by default.
const defaultListeners = 2 * 2768

// newListenLimit returns a limit of half the files that this process may have open.
func newListenLimit() *listenLimit {
	l := &listenLimit{max: defaultListeners}
	if n := modes.OpenFiles() / 2; n < 1<<31 {
		l.max = int64(n)
	}
	return l
}

// listen opens a port. It is for [health.NodePortsConfig].Listen.
func (l *listenLimit) listen(ctx context.Context, network, address string) (net.Listener, error) {
	if l.open.Add(1) > l.max {
		l.open.Add(-1)
		return nil, fmt.Errorf("%d ports are open, half of RLIMIT_NOFILE", l.max)
	}
	inner, err := new(net.ListenConfig).Listen(ctx, network, address)
	if err != nil {
		l.open.Add(-1)
		return nil, err
	}
	return &countedListener{Listener: inner, limit: l}, nil
}

// countedListener counts as open until it is closed.
type countedListener struct {
	net.Listener
	limit  *listenLimit
	closed atomic.Bool
}

func (c *countedListener) Close() error {
	if c.closed.CompareAndSwap(false, true) {
		c.limit.open.Add(-1)
	}
	return c.Listener.Close()
}
