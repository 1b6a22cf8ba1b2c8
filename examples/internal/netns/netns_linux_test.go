package netns_test

import (
	"errors"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/netns"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

func here(t *testing.T) string {
	t.Helper()
	name, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func TestDoRunsInsideAndReturns(t *testing.T) {
	h, home := netlab.NewHost(t), here(t)
	var there string
	var ns *os.File
	if err := h.Do(func() error {
		there = here(t)
		first, err := netns.Open(nil)
		if err != nil {
			return err
		}
		defer first.Close()
		ns, err = netns.Open(first)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	failure := errors.New("failure")
	for range 3 {
		got := ""
		if err := netns.Do(ns, func() error { got = here(t); return failure }); err != failure || got != there {
			t.Errorf("ran in %s, want %s, error %v", got, there, err)
		}
		if now := here(t); now != home {
			t.Fatalf("the caller is in %s afterwards, was in %s", now, home)
		}
	}
	ns.Close()
	if err := netns.Do(ns, func() error { return nil }); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Do after Close: %v, want os.ErrClosed", err)
	}
}

// TestFirstThreadStaysInItsNamespace calls Do from many goroutines, some of which are on the first thread.
func TestFirstThreadStaysInItsNamespace(t *testing.T) {
	h := netlab.NewHost(t)
	var wg sync.WaitGroup
	release := make(chan struct{})
	running := make(chan error)
	const calls = 20
	for range calls {
		wg.Go(func() {
			err := netns.Do(h.File(), func() error {
				var err error
				if unix.Gettid() == unix.Getpid() {
					err = errors.New("Do runs on the first thread")
				}
				running <- err
				<-release
				return nil
			})
			if err != nil {
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
