// Package weight has a program for each package of the library that uses it, and
// a test of what that brings along: the figures of the project's README. It is a
// module of its own, outside the workspace, so that it sees what any other module
// would.
//
//	go test .            (with GOWORK=off, in this folder)
//	go test . -update    after a change that is meant: writes the README's table
package weight
