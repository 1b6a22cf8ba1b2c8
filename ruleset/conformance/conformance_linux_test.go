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

// TestReference runs the whole suite against the reference backend, or one that
// TestBroken asks for.
func TestReference(t *testing.T) {
	needNft(t)
	Run(t, backend(t))
}
