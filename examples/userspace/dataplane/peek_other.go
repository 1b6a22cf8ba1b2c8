//go:build !unix

package dataplane

// peek reports true: the caller must try to read.
func peek(uintptr) (bool, error) { return true, nil }
