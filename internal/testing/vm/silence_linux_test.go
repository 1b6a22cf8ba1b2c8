package vm

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestMachineThatDoesNotStartIsBootedAgain boots with programs in place of qemu.
func TestMachineThatDoesNotStartIsBootedAgain(t *testing.T) {
	image, err := memory("image")
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	for _, c := range []struct {
		name, first string
		ok          bool
	}{
		{"ends", "exit 1", true},
		{"hangs", "exec sleep 600", true},
		{"always hangs", "rm runs; exec sleep 600", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			qemu, err := filepath.Abs("qemu")
			if err != nil {
				t.Fatal(err)
			}
			script := "#!/bin/sh\n[ -e runs ] || { touch runs; " + c.first + "; }\necho ready\nexec sleep 600\n"
			if err := os.WriteFile(qemu, []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			h := &host{qemu: qemu, kernel: &kernel{}, bootTime: time.Second}
			m, err := h.try(context.Background(), image)
			if (err == nil) != c.ok {
				t.Fatal(err)
			}
			if err == nil {
				_ = m.end()
			}
		})
	}
}
