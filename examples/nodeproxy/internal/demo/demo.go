// Package demo is the verb demo: a tour of an agent with real packets. It needs Linux.
package demo

// The texts of demo for every system.
const (
	demoUse   = "demo [flags]"
	demoShort = "take a tour with real packets, without root"
)
