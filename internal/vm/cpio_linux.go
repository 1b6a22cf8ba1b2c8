package vm

import (
	"bufio"
	"fmt"
	"io"
	"path"
)

// archive writes a cpio archive in the "newc" format, which kernels unpack at boot
// (Documentation/driver-api/early-userspace/buffer-format.rst).
type archive struct {
	w    *bufio.Writer
	n    int64
	ino  int
	dirs map[string]bool
	err  error
}

// File types (include/uapi/linux/stat.h).
const (
	modeDir, modeFile, modeLink, modeChar = 0o040000, 0o100000, 0o120000, 0o020000
)

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), dirs: map[string]bool{".": true, "/": true, "": true}}
}

func (a *archive) entry(name string, mode, major, minor int, data []byte) {
	if a.err != nil {
		return
	}
	a.ino++
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0)
	a.write([]byte(header))
	a.write(append([]byte(name), 0))
	a.pad()
	a.write(data)
	a.pad()
}

func (a *archive) write(b []byte) {
	n, err := a.w.Write(b)
	a.n += int64(n)
	if a.err == nil {
		a.err = err
	}
}

func (a *archive) pad() {
	if rest := a.n % 4; rest != 0 {
		a.write(make([]byte, 4-rest))
	}
}

// dir creates a directory and its parents, unless they exist.
func (a *archive) dir(name string) {
	if a.dirs[name] {
		return
	}
	a.dirs[name] = true
	a.dir(path.Dir(name))
	a.entry(name, modeDir|0o755, 0, 0, nil)
}

// file creates a file that everybody may run. Names do not begin with a slash.
func (a *archive) file(name string, data []byte) {
	a.dir(path.Dir(name))
	a.entry(name, modeFile|0o755, 0, 0, data)
}

func (a *archive) link(name, target string) {
	a.dir(path.Dir(name))
	a.entry(name, modeLink|0o777, 0, 0, []byte(target))
}

func (a *archive) charDevice(name string, major, minor int) {
	a.dir(path.Dir(name))
	a.entry(name, modeChar|0o600, major, minor, nil)
}

// close ends the archive.
func (a *archive) close() error {
	a.ino = -1
	a.entry("TRAILER!!!", 0, 0, 0, nil)
	if a.err != nil {
		return a.err
	}
	return a.w.Flush()
}
