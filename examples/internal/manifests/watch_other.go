//go:build !linux

package manifests

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// poll is the interval for reading files.
const poll = time.Second

// Watcher notices changes of a file, or of the files in a folder, by their sizes and times. It is
// not safe for concurrent use.
type Watcher struct {
	path string
	last []byte
}

// NewWatcher returns a Watcher for a file or folder, which need not exist yet.
func NewWatcher(path string) (*Watcher, error) {
	w := &Watcher{path: path}
	w.last = w.look()
	return w, nil
}

// Close does nothing.
func (w *Watcher) Close() error { return nil }

// Wait waits for a change and for its end: until two looks find the same. It returns the error of
// ctx when that is done.
func (w *Watcher) Wait(ctx context.Context) error {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for before := w.last; ; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		now := w.look()
		if !bytes.Equal(now, w.last) && bytes.Equal(now, before) {
			w.last = now
			return nil
		}
		before = now
	}
}

// look returns the names, sizes and times of the files.
func (w *Watcher) look() []byte {
	var out []byte
	_ = filepath.WalkDir(w.path, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			if i, err := os.Stat(path); err == nil {
				out = append(out, path...)
				out = strconv.AppendInt(out, i.Size(), 10)
				out = i.ModTime().AppendFormat(out, time.RFC3339Nano)
			}
		}
		return nil
	})
	return out
}
