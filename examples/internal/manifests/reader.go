package manifests

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/examples/internal/textfile"
)

// Ref names an object. Namespace is empty for a Node or ServiceCIDR.
type Ref struct {
	Kind Kind
	types.NamespacedName
}

// String returns "Kind namespace/name".
func (r Ref) String() string {
	if r.Namespace == "" {
		return string(r.Kind) + " " + r.Name
	}
	return string(r.Kind) + " " + r.NamespacedName.String()
}

// Object is one object of the files. It must not be modified.
type Object struct {
	Ref
	// Value is a *v1.Service, *discovery.EndpointSlice, *v1.Node or
	// *networking.ServiceCIDR, according to Ref.Kind.
	Value metav1.Object

	json   [sha256.Size]byte // the hash of its type and JSON
	review error
	// refused is set if an API server would refuse the object.
	refused bool
}

// Problem is the error for an object or a file that was skipped, or for an object in use.
type Problem struct {
	File string
	Line int // where the document begins, from 1; 0 for the whole file
	Err  error
	// Ref names the object if it is in use. Refused is set if an API server would refuse it.
	Ref     Ref
	Refused bool
}

// Error returns "file:line: reason".
func (p *Problem) Error() string {
	if p.Line == 0 {
		return fmt.Sprintf("%s: %v", p.File, p.Err)
	}
	return fmt.Sprintf("%s:%d: %v", p.File, p.Line, p.Err)
}

// Unwrap returns Err.
func (p *Problem) Unwrap() error { return p.Err }

// Changes holds the differences between two calls of [Reader.Read].
type Changes struct {
	// Any reports whether any file was added, removed or changed, even if only a comment
	// changed.
	Any bool
	// Set holds the new objects, and those whose text changed, in the order of the files.
	Set []*Object
	// Gone holds the names of removed objects, sorted.
	Gone []Ref
	// Problems holds the problems that the last call did not return.
	Problems []*Problem
	// Reviews names, for each object of Set, what an API server would refuse or would set. The
	// object is used as it is.
	Reviews []*Problem
}

// Reader reads the objects of a file or folder, as the package documentation describes. It
// is not safe for concurrent use.
type Reader struct {
	path     string
	room     int64
	files    map[string]*file
	objects  map[Ref]*Object
	problems map[string]bool
}

// NewReader returns a Reader for a file or folder, which need not exist yet.
func NewReader(path string) *Reader { return &Reader{path: path, room: maxSize} }

// maxSize is the maximum size of all files together. 100,000 Services with their slices have 52 MB.
const maxSize = 512 << 20

var errTooLarge = fmt.Errorf("is too large: all files together may have %d MiB", maxSize>>20)

type file struct {
	size int64
	// info identifies the content, so that it need not be read again. It is nil if a change may leave it as it is.
	info      fs.FileInfo
	data      [sha256.Size]byte
	documents []document
	err       error // of the last attempt to read it
}

// Read reads the files and returns the differences since the last call. If the path does
// not exist, or the folder cannot be read, it returns an error and the Reader keeps its
// objects: an unmounted folder must not remove every Service.
func (r *Reader) Read() (Changes, error) {
	names, err := list(r.path)
	if err != nil {
		return Changes{}, fmt.Errorf("manifests: %w", err)
	}
	var c Changes
	files := make(map[string]*file, len(names))
	room := r.room
	for _, name := range names {
		f, changed := readFile(name, r.files[name], room)
		if f == nil && name == r.path {
			return Changes{}, fmt.Errorf("manifests: %s: %w", name, fs.ErrNotExist)
		}
		if f == nil { // removed since the folder was listed
			continue
		}
		files[name] = f
		room -= f.size
		c.Any = c.Any || changed
	}
	for name := range r.files {
		c.Any = c.Any || files[name] == nil
	}
	first := r.files == nil
	r.files = files
	if !c.Any && !first {
		return c, nil
	}
	r.collect(&c)
	return c, nil
}

// collect combines the contents of all files and compares them with the last call's.
func (r *Reader) collect(c *Changes) {
	objects := make(map[Ref]*Object, len(r.objects))
	where := make(map[Ref]string, len(r.objects))
	problems := map[string]bool{}
	report := func(p *Problem) {
		text := p.Error()
		if !problems[text] && !r.problems[text] {
			c.Problems = append(c.Problems, p)
		}
		problems[text] = true
	}
	for _, name := range slices.Sorted(maps.Keys(r.files)) {
		f := r.files[name]
		if f.err != nil {
			report(&Problem{File: name, Err: f.err})
		}
		for _, d := range f.documents {
			for _, err := range d.problems {
				report(&Problem{File: name, Line: d.line, Err: err})
			}
			for _, o := range d.objects {
				if objects[o.Ref] != nil {
					report(&Problem{File: name, Line: d.line, Err: fmt.Errorf("%s is already at %s", o.Ref, where[o.Ref])})
					continue
				}
				where[o.Ref] = fmt.Sprintf("%s:%d", name, d.line)
				if old := r.objects[o.Ref]; old != nil && old.json == o.json {
					objects[o.Ref] = old
					continue
				}
				objects[o.Ref] = o
				c.Set = append(c.Set, o)
				if o.review != nil {
					c.Reviews = append(c.Reviews, &Problem{name, d.line, fmt.Errorf("%s: %w", o.Ref, o.review), o.Ref, o.refused})
				}
			}
		}
	}
	for ref := range r.objects {
		if objects[ref] == nil {
			c.Gone = append(c.Gone, ref)
		}
	}
	slices.SortFunc(c.Gone, func(a, b Ref) int { return strings.Compare(a.String(), b.String()) })
	r.objects, r.problems = objects, problems
}

func list(path string) ([]string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return []string{path}, nil
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if isManifest(e.Name()) {
			names = append(names, filepath.Join(path, e.Name()))
		}
	}
	return names, nil
}

// isManifest reports whether the name is that of a manifest in a folder.
func isManifest(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(name, ".")
	}
	return false
}

// clockGranularity bounds the granularity of file systems' clocks: two changes within this
// time may leave the same modification time.
const clockGranularity = 100 * time.Millisecond

// readFile reads a file and reports whether it differs from f, its last state, which is nil
// at first. It returns nil for a folder, and for a file that does not exist. A file of more than
// room bytes is an error.
func readFile(name string, f *file, room int64) (*file, bool) {
	failed := func(err error) (*file, bool) {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, false
		}
		if p := (*fs.PathError)(nil); errors.As(err, &p) {
			err = p.Err // Problem adds the file's name
		}
		if f == nil {
			return &file{err: err}, true
		}
		kept := *f
		kept.info, kept.err = nil, err
		return &kept, f.err == nil || f.err.Error() != err.Error()
	}
	info, err := os.Stat(name)
	if err != nil {
		return failed(err)
	}
	if info.IsDir() {
		return nil, false
	}
	if !info.Mode().IsRegular() {
		return failed(textfile.ErrNotRegular)
	}
	if f != nil && f.info != nil && os.SameFile(f.info, info) && f.info.Size() == info.Size() && f.info.ModTime().Equal(info.ModTime()) {
		return f, false
	}
	// A program that overwrites a file empties it first.
	for try := 0; try < 50; try++ {
		age := time.Since(info.ModTime())
		if age < 0 || age >= quiet {
			break
		}
		time.Sleep(quiet - age)
		if info, err = os.Stat(name); err != nil {
			return failed(err)
		}
	}
	if time.Since(info.ModTime()) <= clockGranularity { // before reading, so the next call notices a concurrent change
		info = nil
	}
	data, err := textfile.Read(name, room)
	if errors.Is(err, textfile.ErrTooLarge) {
		err = errTooLarge
	}
	if err != nil {
		return failed(err)
	}
	if f == nil {
		f = &file{}
	} else if len(bytes.TrimSpace(data)) == 0 && slices.ContainsFunc(f.documents, func(d document) bool { return len(d.objects) != 0 }) {
		// "kubectl get ... > file" empties the file before the API server has answered.
		return failed(errors.New("is empty: its earlier objects stay in use until it is written or removed"))
	}
	g := &file{size: int64(len(data)), info: info, data: sha256.Sum256(data)}
	if f.err == nil && f.data == g.data {
		g.documents = f.documents
		return g, false
	}
	g.documents = parse(data, f.documents)
	return g, true
}
