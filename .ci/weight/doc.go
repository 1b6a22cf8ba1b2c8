// Package weight holds a program for each package of the library, and a test that compares
// the programs' dependencies and sizes with the table in the project's README. It is a module
// of its own, outside the workspace, so it resolves dependencies as any other module does.
//
//	go test .            (with GOWORK=off, in this folder)
//	go test . -update    after an intended change; writes the README's table
package weight
