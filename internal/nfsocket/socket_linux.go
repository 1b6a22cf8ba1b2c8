package nfsocket

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Socket is a netlink socket to netfilter of one network namespace. It is not
// safe for concurrent use.
type Socket struct {
	fd int
	// file tells the socket from another file with the same number.
	file Identity
	// namespace is a descriptor of the network namespace, -1 if it is not known.
	namespace int
}

// ownNamespace is the network namespace of the calling thread.
const ownNamespace = "/proc/thread-self/ns/net"

// Dial opens a socket in the network namespace with the given file descriptor,
// which is not needed any longer afterwards, or in the calling thread's if it is
// 0. A namespace other than the thread's takes CAP_SYS_ADMIN.
func Dial(netns int) (*Socket, error) {
	s := &Socket{fd: -1, namespace: -1}
	var err error
	if netns == 0 {
		// Without /proc the socket cannot be opened anew, which is no reason to have
		// none.
		if s.namespace, err = unix.Open(ownNamespace, unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
			s.namespace = -1
		}
		err = s.open()
	} else if s.namespace, err = unix.FcntlInt(uintptr(netns), unix.F_DUPFD_CLOEXEC, 3); err != nil {
		s.namespace = -1
		err = fmt.Errorf("network namespace: %w", os.NewSyscallError("fcntl", err))
	} else {
		err = s.Within(s.open)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// FD returns the socket's descriptor, -1 after Close. It is another one after
// [Socket.Redial].
func (s *Socket) FD() int { return s.fd }

// Lost reports whether the descriptor was closed by somebody else, or is another
// file now.
func (s *Socket) Lost() bool {
	file, err := Identify(s.fd)
	return s.fd >= 0 && (err != nil || file != s.file)
}

// Redial opens the socket anew, in the same namespace. The one before is closed,
// unless it was lost: its number may be another file's.
func (s *Socket) Redial() error {
	old := *s
	if err := s.Within(s.open); err != nil {
		return err
	}
	if !old.Lost() {
		unix.Close(old.fd)
	}
	return nil
}

// Within calls f on a thread that is in the socket's namespace.
func (s *Socket) Within(f func() error) error {
	want, err := Identify(s.namespace)
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	runtime.LockOSThread()
	var st unix.Stat_t
	if err := unix.Stat(ownNamespace, &st); err == nil && want == (Identity{uint64(st.Dev), st.Ino}) {
		defer runtime.UnlockOSThread()
		return f()
	}
	runtime.UnlockOSThread()
	done := make(chan error, 1)
	go func() {
		// The thread is not unlocked, so that it ends with the goroutine and nobody
		// finds themselves in the other namespace.
		runtime.LockOSThread()
		if err := unix.Setns(s.namespace, unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter network namespace: %w", os.NewSyscallError("setns", err))
			return
		}
		done <- f()
	}()
	return <-done
}

// open opens a socket in the calling thread's namespace.
func (s *Socket) open() error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("netlink socket: %w", os.NewSyscallError("socket", err))
	}
	file, err := Identify(fd)
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	}
	if err != nil {
		unix.Close(fd)
		return fmt.Errorf("netlink socket: %w", err)
	}
	s.fd, s.file = fd, file
	return nil
}

// Close closes the socket, but not what has its number if it was lost. To close
// it again does nothing.
func (s *Socket) Close() error {
	var err error
	if s.fd >= 0 && !s.Lost() {
		err = unix.Close(s.fd)
	}
	if s.namespace >= 0 {
		err = errors.Join(err, unix.Close(s.namespace))
	}
	s.fd, s.namespace = -1, -1
	return os.NewSyscallError("close", err)
}
