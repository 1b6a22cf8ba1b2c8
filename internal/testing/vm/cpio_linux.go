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
	have map[string]bool // the names in the archive
	err  error
}

// File types (include/uapi/linux/stat.h).
const (
	modeDir, modeFile, modeLink = 0o040000, 0o100000, 0o120000
)

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), have: map[string]bool{".": true, "/": true, "": true}}
}

// entry adds an entry, after the directories that it is in. Names do not begin with a slash.
func (a *archive) entry(name string, mode int, data []byte) {
	if a.err != nil || a.have[name] {
		return
	}
	a.have[name] = true
	a.dir(path.Dir(name))
	a.ino++
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
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

func (a *archive) dir(name string) { a.entry(name, modeDir|0o755, nil) }

// file adds a file that everybody may run.
func (a *archive) file(name string, data []byte) { a.entry(name, modeFile|0o755, data) }

func (a *archive) link(name, target string) { a.entry(name, modeLink|0o777, []byte(target)) }

// close ends the archive.
func (a *archive) close() error {
	a.ino = -1
	a.entry("TRAILER!!!", 0, nil)
	if a.err != nil {
		return a.err
	}
	return a.w.Flush()
}
