package complaint

import (
	"fmt"
	"unicode/utf8"
)

const (
	// MaxValue is the maximum length in bytes of a value from an object in a message.
	MaxValue = 100
	// MaxName is the maximum length in bytes of an object's name with its namespace. The API
	// allows 63 bytes for a namespace and 253 for a name, so it cuts no name of an API server.
	MaxName = 317
	// MaxLong is the maximum length in bytes of a text about several objects.
	MaxLong = 4000
	// MaxText is the maximum length in bytes of a message's text with its values.
	MaxText = 600
)

// Value returns a value from an object for use in a message, cut at MaxValue bytes.
func Value[S ~string](s S) S { return S(clip(string(s), MaxValue)) }

// Name returns the name of an object for use in a message, cut at MaxName bytes.
func Name(s string) string { return clip(s, MaxName) }

// Text returns the text of a message, cut at MaxText bytes.
func Text(s string) string { return clip(s, MaxText) }

// Long returns a text about several objects for use in a message, cut at MaxLong bytes.
func Long(s string) string { return clip(s, MaxLong) }

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
