//go:build !unix

package main

// inUse reports whether another program may use an address and port. It treats every error
// of a listen call so.
func inUse(err error) bool { return err != nil }
