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
	// quiet is how long a file must be unchanged to count as complete.
	quiet = 20 * time.Millisecond
	// maxDelay bounds the wait for the end of changes that follow each other within quiet:
	// files that change all the time must be read too.
	maxDelay = 250 * time.Millisecond
	// stalled is how long a file may stay open without a write, and tooLong how long
	// writes may continue, until the file is read in its current state.
	stalled = 3 * time.Second
	tooLong = 30 * time.Second
	// poll is the interval for reading files without an event, because inotify misses
	// changes on a network file system's server or behind a symbolic link.
	poll = time.Second
)

// Watcher waits for changes of the files of a path with inotify(7). It is not safe for
// concurrent use, except for Close.
type Watcher struct {
	path string
	f    *os.File
	fd   int
	// names holds the file names of interest in each watched folder, by watch descriptor.
	// An empty name stands for all manifests of the folder.
	names map[int32][]string
	// writing holds the files that are being written, with the time of the last write.
	writing map[string]time.Time
}

// NewWatcher returns a Watcher for a file or folder, which need not exist yet. The Watcher
// notices every change after NewWatcher returns.
func NewWatcher(path string) (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if errors.Is(err, unix.EMFILE) {
		return nil, fmt.Errorf("manifests: inotify: %w: raise the sysctl fs.inotify.max_user_instances", err)
	}
	if err != nil {
		return nil, fmt.Errorf("manifests: inotify: %w", err)
	}
	w := &Watcher{path: path, f: os.NewFile(uintptr(fd), "inotify"), fd: fd, writing: map[string]time.Time{}}
	w.watch()
	return w, nil
}

// Close ends the Watcher. A Wait in progress returns an error that wraps [os.ErrClosed].
func (w *Watcher) Close() error { return w.f.Close() }

// watch adds watches for the folders that the current files depend on. Existing watches
// stay. Errors do not matter, because Wait also polls.
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

// Wait waits until files may have changed and are no longer being written, and then returns
// nil. It also returns nil once a second without a change: [Reader.Read] costs little then.
// It returns ctx's error when ctx ends.
func (w *Watcher) Wait(ctx context.Context) error {
	// The end of ctx ends a blocked read by a deadline in the past.
	stop := context.AfterFunc(ctx, func() { w.f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	deadline := time.Now().Add(poll)
	var began time.Time // of the current changes
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

// events waits for an event, reads all that are available, and reports whether any matters.
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
			clear(w.writing) // the event for the end of a write may be lost
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
