package iptables

import "github.com/go-proxier/proxier/ruleset"

// Backend keeps kube-proxy's chains, in the tables filter and nat of both
// families, in agreement with the ruleset: a [ruleset.Backend]. Its methods may be
// called concurrently; they take turns.
type Backend struct{ state }

var _ ruleset.Backend = (*Backend)(nil)
