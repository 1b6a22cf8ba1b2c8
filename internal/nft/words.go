package nft

import "strings"

// Words is what is left of a rule that is being read.
type Words string

// Next returns the next word and skips it. It returns "" at the end.
func (w *Words) Next() string {
	word, rest, _ := strings.Cut(string(*w), " ")
	*w = Words(rest)
	return word
}

// Accept skips words if they come next.
func (w *Words) Accept(words string) bool {
	rest, ok := strings.CutPrefix(string(*w), words)
	if !ok || rest != "" && rest[0] != ' ' {
		return false
	}
	*w = Words(strings.TrimPrefix(rest, " "))
	return true
}

// Begins reports whether text comes next.
func (w Words) Begins(text string) bool { return strings.HasPrefix(string(w), text) }
