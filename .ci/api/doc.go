// Package api checks the exported API of the library: that it is the one noted in
// api.txt, that nothing goes that was not deprecated before, and that everything
// is documented.
//
//	go test .            (with GOWORK=off, in this folder)
//	go test . -update    after a change that is meant; the diff of api.txt is what a
//	                     reviewer has to agree with
//
// It looks at the packages as they are on Linux, which is all there are.
package api
