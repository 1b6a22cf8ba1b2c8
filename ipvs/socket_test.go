//go:build linux

package ipvs

import (
	"errors"
	"os"
	"reflect"
	"runtime"
	"testing"
	"time"

	moby "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestLostSocket closes a socket while a request is made, puts a file in its place, and
// does both over and over: the request is made by another socket, and the file is not
// touched, not even when all is closed and the garbage is collected.
func TestLostSocket(t *testing.T) {
	s := routeSocket(0)
	if err := s.dial(); err != nil {
		t.Fatal(err)
	}
	if s.fd < 0 || s.lost() {
		t.Fatalf("descriptor %d, lost %v", s.fd, s.lost())
	}
	var files []*os.File
	takeAway := func() {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := unix.Dup3(int(f.Fd()), s.fd, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		files = append(files, os.NewFile(uintptr(s.fd), f.Name()))
	}
	loopback := func(h *netlink.Handle) error {
		_, err := h.LinkByName("lo")
		return err
	}
	for n := range 20 {
		calls := 0
		err := s.use(func(h *netlink.Handle) error {
			if calls++; calls == 1 && n%2 == 0 {
				takeAway()
			}
			return loopback(h)
		})
		if want := 2 - n%2; err != nil || calls != want {
			t.Errorf("closed meanwhile: %v, in %d calls, want %d", err, calls, want)
		}
		takeAway()
		if err := s.use(loopback); err != nil {
			t.Errorf("closed before: %v", err)
		}
	}
	// Once too often.
	calls := 0
	err := s.use(func(h *netlink.Handle) error {
		calls++
		takeAway()
		return loopback(h)
	})
	if err == nil || calls != 3 {
		t.Errorf("closed all the time: %v, in %d calls", err, calls)
	}
	// What the request itself says is no reason to make it again.
	calls = 0
	own := errors.New("no")
	if err := s.use(func(*netlink.Handle) error { calls++; return own }); err != own || calls != 1 {
		t.Errorf("%v in %d calls", err, calls)
	}
	takeAway()
	s.close()
	for range 3 {
		runtime.GC()
		time.Sleep(10 * time.Millisecond) // for finalizers
	}
	for _, f := range files {
		if _, err := f.WriteString("mine"); err != nil {
			t.Errorf("somebody else's file: %v", err)
		}
		if err := f.Close(); err != nil {
			t.Errorf("somebody else's file: %v", err)
		}
	}
}

// TestLostNews closes the socket that tells of addresses: there may have been some
// news, and later news arrive.
func TestLostNews(t *testing.T) {
	d, err := dialDevice(0, DefaultDevice)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	if _, err := d.changed(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Close(d.news.fd); err != nil {
		t.Fatal(err)
	}
	if changed, err := d.changed(); !changed || err != nil {
		t.Errorf("lost: %v, %v", changed, err)
	}
	groups, err := unix.GetsockoptInt(d.news.fd, unix.SOL_NETLINK, unix.NETLINK_LIST_MEMBERSHIPS)
	if want := 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1); groups != want || err != nil {
		t.Errorf("the new socket is told of %#x, want %#x: %v", groups, want, err)
	}
}

// TestFieldOf: a library may be written differently one day, after which its sockets
// are not opened anew.
func TestFieldOf(t *testing.T) {
	for _, path := range [][]any{{"nothing", "fd"}, {"sock", "nothing"}, {"sock", 3}, {"sock", "fd", "deeper"}, {3}} {
		if got := fieldOf(reflect.ValueOf(&moby.Handle{}), path...); got != -1 {
			t.Errorf("%v is %d", path, got)
		}
	}
	s := newsSocket(0)
	s.number = func(int) int { return -1 }
	if err := s.dial(); err != nil {
		t.Fatal(err)
	}
	if s.lost() {
		t.Error("a socket that is not known is lost")
	}
	if err := s.use(func(int) error { return nil }); err != nil {
		t.Error(err)
	}
	s.close()
}

// TestSilentKernel gets no answer, and gives up when the time that was set is over.
func TestSilentKernel(t *testing.T) {
	d, err := dialDevice(0, DefaultDevice)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	const field = "receiveTimeout"
	if got := fieldOf(reflect.ValueOf(d.route.handle), "sockets", unix.NETLINK_ROUTE, "Socket", field); time.Duration(got) != netlinkTimeout {
		t.Errorf("rtnetlink's answers are waited for %v, want %v", time.Duration(got), netlinkTimeout)
	}
	sets, err := dialIPSets(0)
	if err != nil {
		t.Fatal(err)
	}
	defer sets.close()
	if send, receive := sets.socket.handle.Socket.GetTimeouts(); send != netlinkTimeout || receive != netlinkTimeout {
		t.Errorf("ipset's answers are waited for %v and %v, want %v", send, receive, netlinkTimeout)
	}

	const short = 100 * time.Millisecond
	if err := d.route.handle.SetSocketTimeout(short); err != nil {
		t.Fatal(err)
	}
	// A filter that lets nothing through.
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	err = unix.SetsockoptSockFprog(d.route.fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop[0]})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if _, err = d.link(); !errors.Is(err, unix.EAGAIN) || time.Since(start) < short {
		t.Errorf("without an answer: %v, after %v", err, time.Since(start))
	}
	if err := unix.SetsockoptInt(d.route.fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0); err != nil {
		t.Fatal(err)
	}
	if err := d.route.handle.SetSocketTimeout(netlinkTimeout); err != nil {
		t.Fatal(err)
	}
	if err := d.use(func(h *netlink.Handle) error { _, err := h.LinkByName("lo"); return err }); err != nil {
		t.Errorf("there are answers again: %v", err)
	}
}

// descriptor is for tests to close, whatever the handle.
func (s *socket[T]) descriptor() int { return s.fd }
