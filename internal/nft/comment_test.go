package nft

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
)

// FuzzComment reads user data of arbitrary bytes.
func FuzzComment(f *testing.F) {
	f.Add([]byte("\x00\x06a/b:c\x00"))
	f.Add([]byte{3, 0, 0, 0})
	f.Add([]byte{0, 255, 1})
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		if got := Comment(data); len(got) > len(data) {
			t.Errorf("a comment of %d bytes in %d", len(got), len(data))
		}
	})
}
