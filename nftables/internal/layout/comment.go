package layout

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/tracker"
)

// MaxComment is the length of the longest element comment that the nft tool shows. With
// its terminator, a comment must fit a one-byte length and the kernel's
// NFT_USERDATA_MAXLEN.
const MaxComment = 127

// UserDataComment is the type under which nft keeps an element's comment in its
// user data (libnftnl, NFTNL_UDATA_SET_ELEM_COMMENT).
const UserDataComment = 0

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

// ServiceComment returns the comment of the elements of a Service port's frontends. Lookup, Ready
// and Traffic read it, in other processes and other versions, so it is a format: it names the
// Service port and has no other words.
func ServiceComment(n tracker.ServicePortName) string { return n.String() }

// ParseServiceComment returns the Service port that a comment of ServiceComment names. The
// comment does not contain the protocol.
func ParseServiceComment(comment string, protocol v1.Protocol) tracker.ServicePortName {
	namespace, name, _ := strings.Cut(comment, "/")
	name, port, _ := strings.Cut(name, ":")
	return tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, Port: port, Protocol: protocol}
}

// CommentSize returns the number of bytes that a comment of the given length adds to an
// element.
func CommentSize(length int) int { return 4 + nfnl.Align(2+min(length, MaxComment)+1) }

// Comment returns the comment in an element's user data, or "".
func Comment(udata []byte) string {
	for len(udata) >= 2 {
		typ, n := udata[0], int(udata[1])
		if 2+n > len(udata) {
			break
		}
		if v := udata[2 : 2+n]; typ == UserDataComment && n > 0 {
			return string(v[:n-1])
		}
		udata = udata[2+n:]
	}
	return ""
}
