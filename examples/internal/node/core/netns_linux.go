package core

import (
	"os"

	"github.com/go-proxier/proxier/internal/netns"
)

// openNetNS opens the network namespace of the calling thread.
func openNetNS() (*os.File, error) { return os.Open("/proc/thread-self/ns/net") }

// doIn calls f on a thread in a network namespace.
func doIn(ns *os.File, f func() error) error { return netns.In(ns, f) }
