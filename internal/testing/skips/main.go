// Skips prints the results of tests and, at the end, how many tests ran, and which were skipped and
// why. go test itself prints nothing about skipped tests of a package that passes.
//
//	go test -json ./... ./examples/... | go run ./internal/testing/skips
//
// A test with subtests is not counted, but its subtests are. The exit status is 1 if a test failed,
// or if a smaller part of the tests ran than the flag -ran requires, in percent.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
)

// remedies are what provides a missing feature, by a word of the reason. The first match counts.
// A reason without a remedy, or that names its own, has "".
var remedies = []struct{ word, remedy string }{
	{"does not support", ""},
	{"without -short", ""},
	{"kube-apiserver", "build it in examples/e2e/apiserver; PROXIER_KUBE_APISERVER names it"},
	{"etcd", "build it in examples/e2e/apiserver; PROXIER_ETCD names it"},
	{"Wine", "apt install wine wine64 gcc-mingw-w64-x86-64"},
	{"virtual machine", "apt install qemu-system-x86 busybox-static; PROXIER_VM_KERNEL=$(.ci/vm-kernel)"},
	{"iptables", "apt install iptables"},
	{"nft", "apt install nftables"},
	{"ipset", "apt install ipset"},
	{"conntrack", "apt install conntrack"},
	{"ipvsadm", "apt install ipvsadm"},
	{"needs ip", "apt install iproute2"},
	{"user namespaces", "run as root, or set the sysctl user.max_user_namespaces"},
	{"BPF", "run as root in the initial user namespace"},
	{"root", "run as root"},
}

func main() {
	percent := flag.Int("ran", 0, "the `percentage` of tests that must run")
	flag.Parse()
	failed, err := summarize(os.Stdin, os.Stdout, *percent)
	if err != nil {
		fmt.Fprintln(os.Stderr, "skips:", err)
		os.Exit(2)
	}
	if failed {
		os.Exit(1)
	}
}

// event is a line of go test -json (go doc cmd/test2json).
type event struct{ Action, Package, Test, Output string }

// summarize reads the events of tests and writes the summary. It reports whether a test or
// package failed, or less than a percentage of the tests ran.
func summarize(in io.Reader, out io.Writer, percent int) (failed bool, err error) {
	output := map[string]string{}    // of each test that runs
	skipped := map[string][]string{} // tests by reason
	parents := map[string]bool{}     // tests with subtests
	ran, total := 0, 0
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<24)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Fprintln(out, lines.Text()) // not of a test, such as an error of the compiler
			continue
		}
		name := e.Package + " " + e.Test
		if i := strings.LastIndexByte(e.Test, '/'); i >= 0 {
			parents[e.Package+" "+e.Test[:i]] = true
		}
		// The result of a test comes after those of its subtests.
		if e.Test != "" && !parents[name] {
			switch e.Action {
			case "pass", "fail":
				ran++
				total++
			case "skip":
				total++
			}
		}
		switch e.Action {
		case "output":
			output[name] += e.Output
			continue
		case "build-output":
			fmt.Fprint(out, e.Output)
			continue
		case "skip":
			if e.Test != "" {
				why := reason(output[name])
				skipped[why] = append(skipped[why], path.Base(e.Package)+"."+e.Test)
			}
		case "fail":
			failed = true
			fmt.Fprint(out, output[name])
		case "pass":
			if e.Test == "" {
				fmt.Fprint(out, lastLine(output[name]))
			}
		default:
			continue
		}
		delete(output, name)
	}
	if len(skipped) != 0 {
		fmt.Fprintln(out, "\nskipped:")
	}
	for _, why := range slices.Sorted(maps.Keys(skipped)) {
		tests := skipped[why]
		fmt.Fprintf(out, "  %s: %d, such as %s\n", why, len(tests), tests[0])
		for _, r := range remedies {
			if !strings.Contains(why, r.word) {
				continue
			}
			if r.remedy != "" {
				fmt.Fprintf(out, "      %s\n", r.remedy)
			}
			break
		}
	}
	fmt.Fprintf(out, "\ntests: %d ran, %d skipped\n", ran, total-ran)
	if 100*ran < percent*total {
		fmt.Fprintf(out, "fewer than %d%% of the tests ran\n", percent)
		failed = true
	}
	return failed, lines.Err()
}

// reason returns the message of a skipped test: the last line that begins with a file and line.
func reason(output string) string {
	why := "no reason given"
	for line := range strings.Lines(output) {
		if _, text, ok := strings.Cut(line, ".go:"); ok {
			if _, text, ok = strings.Cut(text, ": "); ok {
				why = strings.TrimSpace(text)
			}
		}
	}
	return why
}

// lastLine returns the last line of an output, which is a package's result.
func lastLine(output string) string {
	trimmed := strings.TrimSuffix(output, "\n")
	return trimmed[strings.LastIndexByte(trimmed, '\n')+1:] + "\n"
}
