package nftables

type watchState struct{ commits int }

func (s *watchState) rewritten(b *Backend) {}
