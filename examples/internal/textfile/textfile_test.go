package textfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
)

func TestOnlySmallRegularFilesAreRead(t *testing.T) {
	dir := t.TempDir()
	path := func(name string, size int64) string {
		p := filepath.Join(dir, name)
		must.Do(t, os.WriteFile(p, nil, 0o600))
		must.Do(t, os.Truncate(p, size))
		return p
	}
	for _, tt := range []struct {
		name string
		want error
	}{
		{path("full", configSize), nil},
		{path("large", configSize+1), ErrTooLarge},
		{path("huge", 1<<40), ErrTooLarge}, // sparse
		{dir, ErrNotRegular},
		{filepath.Join(dir, "none"), fs.ErrNotExist},
	} {
		text, err := ReadConfig(tt.name)
		if !errors.Is(err, tt.want) || (err == nil) != (len(text) == configSize) {
			t.Errorf("%s: %d bytes, error %v, want %v", tt.name, len(text), err, tt.want)
		}
		if err := CheckConfig("", tt.name); !errors.Is(err, tt.want) {
			t.Errorf("%s: error %v, want %v", tt.name, err, tt.want)
		}
	}
}

// TestEndlessFileIsBounded reads a file that has no size and does not end.
func TestEndlessFileIsBounded(t *testing.T) {
	if _, err := Read("/proc/self/mountinfo", 10); errors.Is(err, fs.ErrNotExist) {
		t.Skip("no /proc")
	} else if !errors.Is(err, ErrTooLarge) {
		t.Errorf("error %v, want %v", err, ErrTooLarge)
	}
}
