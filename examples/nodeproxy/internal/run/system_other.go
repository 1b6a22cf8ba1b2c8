//go:build !linux

package run

import "log/slog"

func setOOMScore(int32) error { return nil }

// Needed returns nothing: there are no capabilities.
func Needed(bool) []int { return nil }

// DropPrivileges does nothing.
func DropPrivileges(*slog.Logger, []int, func(modules bool), func() bool) {}
