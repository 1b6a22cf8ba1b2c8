package manifests

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// follow waits and reads until there is a change.
func follow(t *testing.T, w *Watcher, r *Reader) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		must.Do(t, w.Wait(ctx))
		c := must.Get(r.Read())(t)
		if c.Any {
			return summary(c, r.path)
		}
	}
}

func TestWaitReturnsAfterCompleteWrites(t *testing.T) {
	for _, single := range []bool{false, true} {
		dir := t.TempDir()
		path := dir
		if single {
			path = filepath.Join(dir, "a.yaml")
		}
		write(t, dir, map[string]string{"a.yaml": svc("a")})
		r := NewReader(path)
		w := must.Get(NewWatcher(path))(t)
		defer w.Close()
		must.Get(r.Read())(t)
		step := func(what string, want ...string) {
			t.Helper()
			if got := follow(t, w, r); !slices.Equal(got, want) {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
		}

		write(t, dir, map[string]string{"a.yaml": svc("a") + "---\n" + svc("b")})
		step("overwritten", "set Service default/b")

		write(t, dir, map[string]string{"new": svc("c")})
		must.Do(t, os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, "a.yaml")))
		step("replaced", "set Service default/c", "gone Service default/a", "gone Service default/b")

		// A slow program overwrites the file. Until the second half is written, the
		// earlier objects stay in use.
		f := must.Get(os.Create(filepath.Join(dir, "a.yaml")))(t)
		begun, took := time.Now(), make(chan time.Duration, 1)
		go func() {
			defer f.Close()
			f.WriteString(svc("c"))
			time.Sleep(400 * time.Millisecond)
			f.WriteString("---\n" + svc("d"))
			took <- time.Since(begun)
		}()
		// The first object is unchanged, but is now the last one.
		got := follow(t, w, r)
		if <-took >= stalled && len(got) == 0 {
			got = follow(t, w, r) // on a slow machine the halves are two changes
		}
		if want := []string{"set Service default/d"}; !slices.Equal(got, want) {
			t.Errorf("overwritten slowly: %q, want %q", got, want)
		}

		if single {
			continue
		}
		write(t, dir, map[string]string{"a.yaml": "-"})
		step("removed", "gone Service default/c", "gone Service default/d")
		must.Do(t, os.Symlink(filepath.Join(t.TempDir(), "elsewhere"), filepath.Join(dir, "b.yaml")))
		target := must.Get(os.Readlink(filepath.Join(dir, "b.yaml")))(t)
		write(t, filepath.Dir(target), map[string]string{filepath.Base(target): svc("e")})
		step("behind a link", "set Service default/e")
	}
}

func TestWaitEndsWithContextAndClose(t *testing.T) {
	w, err := NewWatcher(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(10*time.Millisecond, cancel)
	for err == nil {
		err = w.Wait(ctx)
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	must.Do(t, w.Close())
	if err := w.Wait(context.Background()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("error %v after Close", err)
	}
}
