package conntrack

import (
	"testing"

	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/internal/netlab"
)

func TestMain(m *testing.M) {
	confine.Roles{"clean up": cleanUp}.Enter()
	netlab.Main(m)
}
