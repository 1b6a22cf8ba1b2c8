// Package listdiff compares lists that have most elements in common.
package listdiff

// Trim returns the lists without their common prefix and suffix. Few endpoints remain after
// a small update, because an unchanged endpoint keeps its pointer.
func Trim[T comparable](a, b []T) (_, _ []T) {
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}
