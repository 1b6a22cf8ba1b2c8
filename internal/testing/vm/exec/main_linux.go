// Exec runs a test binary in a virtual machine with another kernel, for go test's flag -exec:
//
//	PROXIER_VM_KERNEL=$(.ci/vm-kernel bullseye) go test -exec 'go run ./internal/testing/vm/exec' ./nftables
//
// A comma, as an argument of its own, separates several binaries with their arguments, which run
// one after the other. Package vm describes the machine, which has a copy of the working
// directory's testdata.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/go-proxier/proxier/internal/testing/vm"
)

func main() {
	var commands [][]string
	rest, more := os.Args[1:], true
	for more {
		end := slices.Index(rest, ",")
		if more = end >= 0; !more {
			end = len(rest)
		}
		if end == 0 {
			fmt.Fprintln(os.Stderr, "usage: exec TESTBINARY [ARGUMENT ...] [, TESTBINARY ...]")
			os.Exit(2)
		}
		commands = append(commands, rest[:end])
		rest = rest[min(end+1, len(rest)):]
	}
	status, err := vm.Exec(context.Background(), commands, os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "exec:", err)
		os.Exit(1)
	}
	os.Exit(status)
}
