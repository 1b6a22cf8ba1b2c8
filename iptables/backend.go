package iptables

import "github.com/go-proxier/proxier/ruleset"

// Backend keeps kube-proxy's chains, in the tables filter and nat of both families, in
// agreement with a ruleset. It is a [ruleset.Backend]. Its methods are safe for concurrent
// use.
//
// [New] makes one; the zero value must not be used.
type Backend struct{ state }

var _ ruleset.Backend = (*Backend)(nil)
