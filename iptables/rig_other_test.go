//go:build !linux

package iptables

import (
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// linuxSystems is empty: the kernel in memory is the only one.
var linuxSystems []system

func need(testing.TB, system)       {}
func needSecond(testing.TB, system) {}

func newLinuxNode(testing.TB, Flavor, *Config) testNode { panic("not Linux") }

func lacks(tb testing.TB, what string) { tb.Fatalf("the kernel in memory lacks %s", what) }

func linuxPrograms(*testing.T, tracker.Family) programs { return nil }
