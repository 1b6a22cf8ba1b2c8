package tracker

// Extension is a caller's own data on a [ServicePort] or [Endpoint]. A hook of
// [Config] sets it. The tracker calls Equal to detect changes. Equal must return true
// exactly if the caller's backend would treat both values alike. It must accept nil
// and values of other types, and must be safe for concurrent use. An Extension must
// not change after its hook has returned.
//
// The tracker does not use == because pointers compare by address: parsing the same
// annotation twice would count as a change.
type Extension interface {
	Equal(Extension) bool
}

// ExtAs returns x as a T, and whether x is a T.
func ExtAs[T Extension](x Extension) (T, bool) {
	t, ok := x.(T)
	return t, ok
}

// equalExt compares two extensions. Either may be nil.
func equalExt(a, b Extension) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return a.Equal(b)
}
