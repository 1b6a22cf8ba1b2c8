package nft

import "strings"

// MaxComment is the length of the longest element comment that the nft tool shows, and that fits the kernel's
// NFT_USERDATA_MAXLEN.
const MaxComment = 127

// userDataComment is the type under which nft keeps an element's comment in its
// user data (libnftnl, NFTNL_UDATA_SET_ELEM_COMMENT).
const userDataComment = 0

// Printable returns a comment as an element stores it: cut to MaxComment bytes, with
// "?" for bytes that could confuse a terminal or a parser.
func Printable(s string) string {
	s = s[:min(len(s), MaxComment)]
	odd := func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }
	if !strings.ContainsFunc(s, odd) {
		return s
	}
	b := []byte(s)
	for i, c := range b {
		if odd(rune(c)) {
			b[i] = '?'
		}
	}
	return string(b)
}

// Comment returns the comment in an element's user data, or "".
func Comment(udata []byte) string {
	for len(udata) >= 2 {
		typ, n := udata[0], int(udata[1])
		if 2+n > len(udata) {
			break
		}
		if v := udata[2 : 2+n]; typ == userDataComment && n > 0 {
			return string(v[:n-1])
		}
		udata = udata[2+n:]
	}
	return ""
}
