package textfile

import (
	"errors"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPipeDoesNotBlock(t *testing.T) {
	p := filepath.Join(t.TempDir(), "p")
	if err := unix.Mkfifo(p, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{p, "/dev/zero"} {
		if _, err := ReadConfig(name); !errors.Is(err, ErrNotRegular) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
