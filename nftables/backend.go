package nftables

// Backend programs one network namespace's nf_tables. It implements
// [ruleset.Backend]. Its methods are safe for concurrent use. Methods called after
// [Backend.Close] change nothing and return an error that wraps [os.ErrClosed].
//
// [New] makes one; the zero value must not be used.
type Backend struct {
	state
}
