// Package conformance holds nothing but tests: the conformance suite for the
// backends on the kernel of package vm, beside the running one on which their own
// tests run it.
package conformance
