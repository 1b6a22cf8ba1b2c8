// Exec runs a test binary in a virtual machine with another kernel, for go test's flag -exec:
//
//	PROXIER_VM_KERNEL=$(.ci/vm-kernel bullseye) go test -exec 'go run ./internal/testing/vm/exec' ./nftables
//
// Package vm describes the machine, which has a copy of the package's testdata.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/go-proxier/proxier/internal/testing/vm"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: exec TESTBINARY [ARGUMENT ...]")
		os.Exit(2)
	}
	status, err := vm.Exec(context.Background(), os.Args[1], os.Args[2:], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "exec:", err)
		os.Exit(1)
	}
	os.Exit(status)
}
