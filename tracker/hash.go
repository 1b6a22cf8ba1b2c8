package tracker

// Hash says from what of a new connection its endpoint follows. Kubernetes has no
// field for it: only hooks set it (see [Config.OnService]).
type Hash uint8

const (
	// HashNone: from nothing. Endpoints are drawn at random, each as likely as its
	// weight.
	HashNone Hash = iota
	// HashSource: from the client's address. All connections of a client lead to one
	// endpoint.
	HashSource
	// HashSourcePort: from the client's address and port. Nodes that know the same
	// endpoints send the packets of a connection to the same one, also if they did
	// not see its beginning.
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
