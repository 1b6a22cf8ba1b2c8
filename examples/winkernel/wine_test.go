//go:build linux

package winkernel_test

import (
	"testing"

	"github.com/go-proxier/proxier/examples/internal/standin"
)

// TestUnderWine runs the other tests as a Windows program, which calls the service by hnslib and
// the stand-in's DLLs. With -dlls.all it runs the whole conformance suite and kills the process
// before each write of the worlds.
func TestUnderWine(t *testing.T) {
	if *dlls {
		t.Skip("runs the tests without -dlls")
	}
	run := "^(TestWorlds|TestConformance|TestChange.*|TestRestart.*|TestLoad.*|TestCheck.*|TestStopped.*|TestFailed.*|TestUseless.*|TestHostNetwork.*|TestCleanup.*|TestInvalid.*|TestClosed.*|TestDocuments.*|TestKilled.*)$"
	// Tests take turns: the DLLs know one service.
	args := []string{"-dlls", "-test.parallel=1", "-test.timeout=60m", "-worlds=" + *worlds}
	switch {
	case testing.Short():
		run = "^TestWorlds$"
	case *allDLLs:
		args = append(args, "-dlls.all")
	default:
		args = append(args, "-kill.every=20")
	}
	standin.Start(t).Test(t, append(args, "-test.run="+run)...)
}

// TestOldVersionUnderWine runs TestOldVersion as a Windows program of its own.
func TestOldVersionUnderWine(t *testing.T) {
	standin.Start(t).Test(t, "-dlls", "-dlls.version=9.1", "-test.run=^TestOldVersion$")
}
