package nfsocket

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netlab"
)

func TestMain(m *testing.M) { netlab.Main(m) }

// namespaceOf returns the network namespace of a netlink socket.
func namespaceOf(t *testing.T, fd int) Identity {
	t.Helper()
	// SIOCGSKNS of linux/sockios.h; the answer is a descriptor.
	ns, err := unix.IoctlRetInt(fd, unix.SIOCGSKNS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ns)
	id, err := Identify(ns)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestRedial loses a socket, to nobody and to another file, in the process's own
// namespace and in another: it is found out, and another opened where it was.
func TestRedial(t *testing.T) {
	netlab.Require(t)
	lab, err := netlab.New()
	if err != nil {
		t.Fatal(err)
	}
	defer lab.Close()
	h, err := lab.Host("elsewhere")
	if err != nil {
		t.Fatal(err)
	}
	for _, netns := range []int{0, h.FD()} {
		s, err := Dial(netns)
		if err != nil {
			t.Fatal(err)
		}
		where := namespaceOf(t, s.FD())
		if s.Lost() {
			t.Fatal("lost from the beginning")
		}
		null, err := os.Open("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		defer null.Close()

		lost := s.FD()
		if err := unix.Dup3(int(null.Fd()), lost, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		if !s.Lost() {
			t.Error("another file is taken for the socket")
		}
		if err := s.Redial(); err != nil || s.Lost() || s.FD() == lost {
			t.Fatalf("dialled anew: %v, lost %v, descriptor %d", err, s.Lost(), s.FD())
		}
		if id, err := Identify(lost); err != nil || id == s.file {
			t.Errorf("somebody else's file was closed: %v, %v", id, err)
		}
		unix.Close(lost)
		if now := namespaceOf(t, s.FD()); now != where {
			t.Errorf("the namespace is %v, was %v", now, where)
		}

		unix.Close(s.FD())
		if !s.Lost() {
			t.Error("a closed socket is taken for one")
		}
		if err := s.Redial(); err != nil || s.Lost() {
			t.Fatalf("dialled anew: %v, lost %v", err, s.Lost())
		}
		if now := namespaceOf(t, s.FD()); now != where {
			t.Errorf("the namespace is %v, was %v", now, where)
		}

		// One that is not lost is replaced all the same, and closed.
		before := s.FD()
		if err := s.Redial(); err != nil {
			t.Fatal(err)
		}
		if id, err := Identify(before); err == nil && before != s.FD() {
			t.Errorf("%v is left open", id)
		}
		for range 2 {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
		if s.FD() >= 0 || s.Lost() {
			t.Errorf("after Close: %d, lost %v", s.FD(), s.Lost())
		}
	}
	if _, err := Dial(1 << 20); err == nil {
		t.Error("there is no such namespace")
	}
}
