package follow

import (
	"context"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// TestTraceWithManyOpenFiles follows a packet in a process with more than 1,024 open files.
func TestTraceWithManyOpenFiles(t *testing.T) {
	netlab.Require(t)
	netlab.ManyFiles(t)
	node := netlab.NewHost(t)
	to := netip.MustParseAddrPort("127.0.0.1:9")
	var f Follower
	err := node.Do(func() (err error) {
		f, err = NFTrace(Filter{To: to, Protocol: unix.IPPROTO_UDP})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := must.Get(node.Dial(t.Context(), "udp", "", to.String()))(t)
	defer c.Close()
	must.Get(c.Write([]byte("hello")))(t)
	ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
	defer cancel()
	var got *Packet
	err = f.Follow(ctx, func(p *Packet) bool {
		got = p
		return false
	})
	if err != nil || got == nil || got.To != to {
		t.Errorf("packet %+v: %v", got, err)
	}
}
