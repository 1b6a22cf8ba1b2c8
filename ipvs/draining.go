//go:build linux

package ipvs

// Draining returns how many real servers drain: those that get no new connections
// and keep the ones they have. It is 0 while it is not known what is in the kernel,
// before the first full delta. Together with a full delta without Services it tells
// when the backend can be cleaned up without ending connections.
func (b *Backend) Draining() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, s := range b.states {
		for _, reals := range s.draining {
			n += len(reals)
		}
	}
	return n
}
