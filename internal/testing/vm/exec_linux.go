package vm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
)

// Exec boots a virtual machine, runs a test binary with the arguments in it, copies the
// output to out and returns the exit status. Files that the arguments name, such as
// -test.coverprofile, stay in the machine. The error wraps [ErrMissing] if this system lacks
// what a machine needs.
func Exec(ctx context.Context, program string, args []string, out io.Writer) (status int, err error) {
	h, err := findHost()
	if err != nil {
		return 0, err
	}
	args = slices.DeleteFunc(slices.Clone(args), func(a string) bool { return strings.HasPrefix(a, "-test.testlogfile=") })
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for range boots {
		dir, err := os.MkdirTemp("", "proxier-vm")
		if err != nil {
			return 0, err
		}
		defer os.RemoveAll(dir)
		c, err := h.boot(ctx, dir, program, args)
		if err != nil {
			return 0, err
		}
		lines, ok, err := c.start()
		if err != nil {
			return 0, err
		}
		_, copied := io.Copy(out, lines)
		ended := c.Wait()
		if !ok {
			continue
		}
		status, err := c.status()
		if err != nil {
			return 0, errors.Join(err, ended, copied)
		}
		return status, copied
	}
	return 0, fmt.Errorf("the machine did not start the test in %d attempts", boots)
}
