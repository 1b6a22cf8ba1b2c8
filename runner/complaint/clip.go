package complaint

import (
	"fmt"
	"unicode/utf8"
)

const (
	maxValue = 100
	// The API allows 63 bytes for a namespace and 253 for a name.
	maxName = 317
	maxLong = 4000
	maxText = 600
)

// Value returns a value from an object for use in a message, cut at 100 bytes.
func Value[S ~string](s S) S { return S(clip(string(s), maxValue)) }

// Name returns the name of an object for use in a message, cut at 317 bytes, the most that the
// API allows.
func Name(s string) string { return clip(s, maxName) }

// Text returns the text of a message, cut at 600 bytes.
func Text(s string) string { return clip(s, maxText) }

// Long returns a text about several objects for use in a message, cut at 4,000 bytes.
func Long(s string) string { return clip(s, maxLong) }

// clip returns s, cut at most bytes and at the end of a character. A cut text ends with the
// number of bytes that are missing.
func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	cut := most
	for cut > most-utf8.UTFMax && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return fmt.Sprintf("%s... (%d more bytes)", s[:cut], len(s)-cut)
}
