//go:build !linux

// Package tuple is empty on other systems than Linux.
package tuple
