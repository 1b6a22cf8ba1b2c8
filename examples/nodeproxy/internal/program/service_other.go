//go:build !windows

package program

// runAsService returns false: only Windows has services of this kind.
func runAsService([]string) (code int, ran bool) { return 0, false }
