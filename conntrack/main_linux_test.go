package conntrack

import (
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }
