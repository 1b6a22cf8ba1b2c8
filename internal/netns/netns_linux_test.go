package netns_test

import (
	"errors"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// here returns what identifies the calling thread's network namespace.
func here(t *testing.T) string {
	t.Helper()
	name := must.Get(os.Readlink("/proc/thread-self/ns/net"))(t)
	return name
}

func TestDoRunsInsideAndReturns(t *testing.T) {
	h := netlab.NewHost(t)
	home := here(t)
	var there string
	must.Do(t, h.Do(func() error { there = here(t); return nil }))
	var ns *netns.Namespace
	if err := h.Do(func() error {
		file, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		defer file.Close()
		ns, err = netns.Open(file)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	failure := errors.New("failure")
	for range 3 {
		got := ""
		if err := ns.Do(func() error { got = here(t); return failure }); err != failure {
			t.Errorf("Do returned %v, want the error of its function", err)
		}
		if got != there {
			t.Errorf("ran in %s, want %s", got, there)
		}
		if now := here(t); now != home {
			t.Fatalf("the caller is in %s afterwards, was in %s", now, home)
		}
	}
	// A panic passes through and leaves the thread where it was.
	func() {
		defer func() { _ = recover() }()
		_ = ns.Do(func() error { panic("expected") })
	}()
	if now := here(t); now != home {
		t.Errorf("the caller is in %s after a panic, was in %s", now, home)
	}
	// Inside of the namespace, Do needs to enter nothing.
	if err := h.Do(func() error { return ns.Do(func() error { return nil }) }); err != nil {
		t.Error(err)
	}
	if err := ns.Close(); err != nil {
		t.Error(err)
	}
	if err := ns.Do(func() error { return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Do after Close: %v, want os.ErrClosed", err)
	}
}

func TestNilIsTheThreadsNamespace(t *testing.T) {
	h := netlab.NewHost(t)
	var ns *netns.Namespace
	var there string
	must.Do(t, h.Do(func() (err error) { there = here(t); ns, err = netns.Open(nil); return err }))
	defer ns.Close()
	got := ""
	if err := ns.Do(func() error { got = here(t); return nil }); err != nil || got != there {
		t.Errorf("ran in %s, want %s, error %v", got, there, err)
	}
}

func TestDoRejectsFileOfNoNamespace(t *testing.T) {
	f := must.Get(os.Open("/dev/null"))(t)
	defer f.Close()
	ns := must.Get(netns.Open(f))(t)
	defer ns.Close()
	home := here(t)
	if err := ns.Do(func() error { t.Error("the function was called"); return nil }); err == nil {
		t.Error("no error for a file that is not a network namespace")
	}
	if now := here(t); now != home {
		t.Errorf("the caller is in %s afterwards, was in %s", now, home)
	}
}

// TestFirstThreadStaysInItsNamespace calls In from many goroutines, some of which are on the first thread.
func TestFirstThreadStaysInItsNamespace(t *testing.T) {
	h := netlab.NewHost(t)
	var wg sync.WaitGroup
	release := make(chan struct{})
	running := make(chan error)
	const calls = 20
	for range calls {
		wg.Go(func() {
			if err := netns.In(h.File(), func() error {
				var err error
				if unix.Gettid() == unix.Getpid() {
					err = errors.New("In runs on the first thread")
				}
				running <- err
				<-release
				return nil
			}); err != nil {
				t.Error(err)
			}
		})
	}
	for range calls {
		if err := <-running; err != nil {
			t.Error(err)
		}
	}
	close(release)
	wg.Wait()
}
