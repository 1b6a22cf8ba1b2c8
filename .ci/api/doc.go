// Package api checks the exported API of the library: it must be recorded in api.txt, only
// deprecated API may be removed, and everything must be documented.
//
//	go test .            (with GOWORK=off, in this folder)
//	go test . -update    after an intended change; reviewers check the diff of api.txt
//
// It checks the packages as built for Linux, which are all packages.
package api
