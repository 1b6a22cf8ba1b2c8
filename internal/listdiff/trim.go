// Package listdiff compares lists of which most elements are the same.
package listdiff

// Trim returns the lists without their common beginning and end. An unchanged endpoint keeps
// its pointer in an update. So little is left of lists of endpoints after a small update.
func Trim[T comparable](a, b []T) (_, _ []T) {
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}
