package tracker

// Hash selects the part of a new connection that determines its endpoint. Kubernetes
// has no field for it; only hooks set it (see [Config.OnService]).
type Hash uint8

const (
	// HashNone chooses endpoints at random, in proportion to their weights.
	HashNone Hash = iota
	// HashSource hashes the client's address. All connections of a client use one
	// endpoint.
	HashSource
	// HashSourcePort hashes the client's address and port. Nodes with the same
	// endpoints send the packets of a connection to the same endpoint, even if they
	// did not see its first packet.
	HashSourcePort
)

// String returns "none", "source" or "source and port".
func (h Hash) String() string {
	switch h {
	case HashNone:
		return "none"
	case HashSource:
		return "source"
	case HashSourcePort:
		return "source and port"
	}
	return "unknown"
}
