//go:build linux

package backendtest

import "os"

// ExhaustFiles opens files until the process cannot open another one. release closes them.
func ExhaustFiles() (release func()) {
	var files []*os.File
	for {
		f, err := os.Open(os.DevNull)
		if err != nil {
			break
		}
		files = append(files, f)
	}
	return func() {
		for _, f := range files {
			f.Close()
		}
	}
}
