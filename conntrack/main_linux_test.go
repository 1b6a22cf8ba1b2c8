package conntrack

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) {
	confine.Roles{"clean up": cleanUp}.Enter()
	netlab.Main(m)
}

// kernelAt opens the host's table until the end of the test.
func kernelAt(tb testing.TB, h *netlab.Host, zones ...uint16) *KernelTable {
	tb.Helper()
	k := must.Get(OpenKernelTable(Config{NetNS: h.File(), Zones: zones}))(tb)
	tb.Cleanup(func() { k.Close() })
	return k
}
