package inspect

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-proxier/proxier/tracker"
)

// printLine writes one line with values that an object or another program chose.
func printLine(out io.Writer, format string, args ...any) {
	fmt.Fprintln(out, printable(fmt.Sprintf(format, args...)))
}

// printable returns s with the escape sequences of Go in place of everything that is not
// printable, so that a terminal does not interpret it and s stays one line.
func printable(s string) string {
	s = strings.ToValidUTF8(s, string(utf8.RuneError))
	odd := func(r rune) bool { return !strconv.IsPrint(r) }
	if !strings.ContainsFunc(s, odd) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if odd(r) {
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// minStored is the length up to which every data plane stores the name of a Service port
// completely: the longest comment of an element of nftables.
const minStored = 127

// storedAs reports whether stored, a name from the kernel, can be that of a Service port.
// Data planes store "?" for bytes that a tool could misread, and shorten long names. The
// name that iptables stores ends at a blank.
func storedAs(stored string, name tracker.ServicePortName) bool {
	full := name.String()
	if len(stored) > len(full) {
		return false
	}
	for i := range len(stored) {
		if stored[i] != full[i] && stored[i] != '?' {
			return false
		}
	}
	return len(stored) == len(full) || len(stored) >= minStored || full[len(stored)] == ' '
}
