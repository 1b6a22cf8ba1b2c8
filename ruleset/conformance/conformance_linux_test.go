package conformance

import (
	"os/exec"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
)

func TestMain(m *testing.M) { Main(m) }

func needNft(t *testing.T) {
	t.Helper()
	_, err := exec.LookPath("nft")
	netlab.Need(t, err == nil, "the nft program")
}

// TestReferencePasses runs the whole suite against the reference backend, or against
// one that TestBrokenBackendsFail selects.
func TestReferencePasses(t *testing.T) {
	needNft(t)
	Run(t, backend(t))
}
