package inspect

import (
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
)

// TestTraceWithManyOpenFiles follows a packet in a process with more than 1,024 open files.
func TestTraceWithManyOpenFiles(t *testing.T) {
	netlab.Require(t)
	netlab.ManyFiles(t)
	node := netlab.NewHost(t)
	to := netip.MustParseAddrPort("127.0.0.1:9")
	var f *follower
	must.Do(t, node.Do(func() (err error) {
		f, err = follow(ruleset.Packet{To: to, Protocol: v1.ProtocolUDP}, netip.AddrPort{}, true)
		return err
	}))
	defer f.close()
	c := must.Get(node.Dial(t.Context(), "udp", "", to.String()))(t)
	defer c.Close()
	must.Get(c.Write([]byte("hello")))(t)
	var got []*connection
	for end := time.Now().Add(testtime.Timeout); len(got) == 0 && time.Now().Before(end); got = f.take(idle) {
		must.Do(t, f.receive())
	}
	if len(got) != 1 || got[0].to != to || got[0].end != delivered {
		t.Errorf("connections %+v", got)
	}
}
