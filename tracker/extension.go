package tracker

// Extension is a caller's own data on a [ServicePort] or [Endpoint], put there
// by a hook of [Config]. Equal is how a change of it is noticed: it must be true
// exactly when nothing that the caller's backend does would differ, must accept
// values of other types and nil, and must be safe for concurrent use. An
// Extension must not be changed once its hook has returned.
//
// Equal is asked for, rather than == used, because pointers compare by address:
// an equal value parsed anew would count as a change on every event.
type Extension interface {
	Equal(Extension) bool
}

// ExtAs returns x as a T, and whether it is one.
func ExtAs[T Extension](x Extension) (T, bool) {
	t, ok := x.(T)
	return t, ok
}

// equalExt compares two extensions of which either may be nil.
func equalExt(a, b Extension) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return a.Equal(b)
}
