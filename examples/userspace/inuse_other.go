//go:build !unix

package main

// inUse reports whether somebody else has an address and port, as far as can be
// told.
func inUse(err error) bool { return err != nil }
