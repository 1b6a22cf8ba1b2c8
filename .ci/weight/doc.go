// Package weight has one program for each package of the library, and a test that compares the
// packages and modules of each program with the table in examples/e2e/MEASUREMENTS.md. It is a module
// of its own, outside the workspace, so that it sees what any other module would.
//
//	go test .            (with GOWORK=off, in this folder)
//	go test . -update    rewrites the table
package weight
