// Package textfile reads files that people name, and refuses those that would block the reader or fill memory.
package textfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
)

// The errors about files that are not read. They are wrapped by an [fs.PathError].
var (
	ErrNotRegular = errors.New("is not a regular file") // a pipe might never end
	ErrTooLarge   = errors.New("is too large")
)

// configSize is the maximum size of a file for [ReadConfig]. A ConfigMap and a Secret have 1 MiB at most.
const configSize = 4 << 20

// ReadConfig reads a regular file of at most 4 MiB.
func ReadConfig(name string) ([]byte, error) { return Read(name, configSize) }

// CheckConfig returns the error of ReadConfig for each name that is not "". It is for files that another package
// reads.
func CheckConfig(names ...string) error {
	for _, name := range names {
		if name != "" {
			if _, err := ReadConfig(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// Read reads a regular file of at most most bytes, which may be growing.
func Read(name string, most int64) ([]byte, error) {
	refuse := func(err error) ([]byte, error) { return nil, &fs.PathError{Op: "read", Path: name, Err: err} }
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return refuse(ErrNotRegular)
	}
	if info.Size() > most {
		return refuse(fmt.Errorf("%w: more than %d bytes", ErrTooLarge, most))
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data := bytes.NewBuffer(make([]byte, 0, info.Size()+bytes.MinRead))
	n, err := data.ReadFrom(io.LimitReader(f, most+1))
	if err == nil && n > most {
		return refuse(fmt.Errorf("%w: more than %d bytes", ErrTooLarge, most))
	}
	return data.Bytes(), err
}
