package manifests

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// maxDelay is how long to wait for the changes to end that come at less than
	// quiet from each other: what never stops is read now and then all the same.
	maxDelay = 250 * time.Millisecond
	// stalled is how long a file may be open without being written to, and
	// tooLong how long it may be written to, until it is read as it is.
	stalled = 3 * time.Second
	tooLong = 30 * time.Second
	// poll is how often to look without having been told to: for what inotify does
	// not see, such as files changed on a network file system's server or behind
	// a symbolic link.
	poll = time.Second
)

// Watcher waits for the files of a path to change, with inotify(7). It must not
// be used from several goroutines at once, except for Close.
type Watcher struct {
	path string
	f    *os.File
	fd   int
	// names is what matters in each watched folder, by watch descriptor: a file, or
	// "" for all that is read of a folder.
	names map[int32][]string
	// writing is the files that are being written, and when they last were.
	writing map[string]time.Time
}

// NewWatcher returns a Watcher for a file or folder, which need not exist yet.
// Changes after it returns are noticed.
func NewWatcher(path string) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("manifests: inotify: %w", err)
	}
	w := &Watcher{path: path, f: os.NewFile(uintptr(fd), "inotify"), fd: fd, writing: map[string]time.Time{}}
	w.watch()
	return w, nil
}

// Close ends the Watcher, and a Wait with an error that is [os.ErrClosed].
func (w *Watcher) Close() error { return w.f.Close() }

// watch asks for the events of the folders that the files depend on, as they
// are now. Those that are watched already stay so. Errors do not matter: what is
// not watched is polled.
func (w *Watcher) watch() {
	const events = unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_CREATE | unix.IN_DELETE |
		unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB | unix.IN_ONLYDIR
	w.names = map[int32][]string{}
	add := func(dir, name string) {
		if wd, err := unix.InotifyAddWatch(w.fd, dir, events); err == nil {
			w.names[int32(wd)] = append(w.names[int32(wd)], name)
		}
	}
	add(w.path, "") // fails for a file
	add(filepath.Dir(w.path), filepath.Base(w.path))
	if target, err := filepath.EvalSymlinks(w.path); err == nil {
		add(filepath.Dir(target), filepath.Base(target))
	}
}

// matters reports whether an event about a name in a folder is of interest.
func (w *Watcher) matters(wd int32, name string) bool {
	return slices.ContainsFunc(w.names[wd], func(n string) bool {
		// Mounted ConfigMaps are switched by renaming the link "..data".
		return n == name || strings.HasPrefix(name, "..") || n == "" && isManifest(name)
	})
}

// Wait returns nil when the files may have changed and are no longer being
// written, and every so often without a reason: [Reader.Read] tells what is
// different, at little cost if nothing is. It returns ctx's error when that ends.
func (w *Watcher) Wait(ctx context.Context) error {
	// A read waits until its deadline, which ctx's end moves to the past.
	stop := context.AfterFunc(ctx, func() { w.f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	deadline := time.Now().Add(poll)
	var began time.Time // of what is going on
	for {
		w.watch()
		w.f.SetReadDeadline(deadline)
		if err := ctx.Err(); err != nil {
			return err
		}
		matters, err := w.events()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return fmt.Errorf("manifests: inotify: %w", err)
		case !matters:
			continue
		}
		now := time.Now()
		if began.IsZero() {
			began = now
		}
		deadline = earlier(now.Add(quiet), began.Add(maxDelay))
		for name, last := range w.writing {
			if until := earlier(last.Add(stalled), began.Add(tooLong)); !until.After(now) {
				delete(w.writing, name)
			} else if until.After(deadline) {
				deadline = until
			}
		}
	}
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// events reads the events there are, waiting for one, and reports whether any
// matters.
func (w *Watcher) events() (matters bool, err error) {
	var buf [16 << 10]byte
	n, err := w.f.Read(buf[:])
	if err != nil {
		return false, err
	}
	const header = int(unsafe.Sizeof(unix.InotifyEvent{}))
	for b := buf[:n]; len(b) >= header; {
		// struct inotify_event: wd, mask, cookie, len, name
		wd := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		length := min(header+int(binary.NativeEndian.Uint32(b[12:])), len(b))
		name := string(bytes.TrimRight(b[header:length], "\x00"))
		b = b[length:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			clear(w.writing) // what ended may have been lost
			matters = true
		}
		if !w.matters(wd, name) {
			continue
		}
		matters = true
		switch {
		case mask&unix.IN_MODIFY != 0:
			w.writing[name] = time.Now()
		case mask&(unix.IN_CLOSE_WRITE|unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_MOVED_TO) != 0:
			delete(w.writing, name)
		}
	}
	return matters, nil
}
