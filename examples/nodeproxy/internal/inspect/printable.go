package inspect

import (
	"fmt"
	"io"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/tracker"
)

// printLine writes one line with values that an object or another program chose. All verbs of this package
// print with it.
func printLine(out io.Writer, format string, args ...any) error {
	_, err := fmt.Fprintln(out, complaint.Printable(fmt.Sprintf(format, args...)))
	return err
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
