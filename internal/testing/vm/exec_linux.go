package vm

import (
	"cmp"
	"context"
	"io"
	"slices"
	"strings"
)

// Exec boots a virtual machine, runs the commands in it one after the other, copies their output to
// out and returns the last exit status that is not 0. A command is a test binary with its
// arguments. Files that the arguments name, such as -test.coverprofile, stay in the machine. The
// error wraps [ErrMissing] if this system lacks what a machine needs.
func Exec(ctx context.Context, commands [][]string, out io.Writer) (status int, err error) {
	h, err := findHost()
	if err != nil {
		return 0, err
	}
	var programs []string
	for _, c := range commands {
		programs = append(programs, c[0])
	}
	m, err := h.boot(ctx, programs)
	if err != nil {
		return 0, err
	}
	defer m.end()
	var copied error
	for i, c := range commands {
		args := slices.DeleteFunc(slices.Clone(c[1:]), func(a string) bool { return strings.HasPrefix(a, "-test.testlogfile=") })
		code, err := m.run(ctx, command(i, args), func(line string) {
			if copied == nil {
				_, copied = io.WriteString(out, line)
			}
		})
		if err = cmp.Or(err, copied); err != nil {
			return 0, err
		}
		status = cmp.Or(code, status)
	}
	return status, nil
}
