//go:build !linux

package stall

// processors returns a function that does nothing, for one goroutine that polls anywhere.
func processors() []func() { return []func(){func() {}} }
