package textfile

import (
	"errors"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/must"
)

func TestPipeDoesNotBlock(t *testing.T) {
	p := filepath.Join(t.TempDir(), "p")
	must.Do(t, unix.Mkfifo(p, 0o600))
	for _, name := range []string{p, "/dev/zero"} {
		if _, err := ReadConfig(name); !errors.Is(err, ErrNotRegular) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
