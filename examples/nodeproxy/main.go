// Nodeproxy is a complete Service proxy for one node, and the place to see how
// the library's packages are put together. It takes Services and EndpointSlices
// from files instead of an API server, and programs nftables.
//
//	nodeproxy run --manifests PATH    program the network namespace it runs in
//	nodeproxy run --cleanup           remove what run left there
//	nodeproxy explain --manifests PATH 10.0.0.10:80
//	                                  tell what must happen to a packet, and why
//	nodeproxy demo                    show it all at work; needs no privileges
//
// See "nodeproxy run --help" for its flags, which are named as kube-proxy's where
// they mean the same. It needs CAP_NET_ADMIN and Linux 5.15 or later.
//
// For each change of the manifests that is in effect, run writes one line to
// standard output,
//
//	synced services=2 endpoints=5 changed=1 took=412.3µs
//
// also if nothing had to be changed in the kernel. Services is the number of
// Services that have a port to serve, and endpoints the number of endpoints this
// node may send to, added up over their ports in each address family. Changed is
// the number of Service ports, in each address family, whose rules are different.
// Took is the time from the last object handed in to the kernel's commit. A
// further field failed=N counts Service ports that could not be programmed, which
// is tried again. Everything else is logged to standard error.
//
// How to read the code: world.go is the part from objects to the ruleset,
// agent.go the part from there to the kernel; demo.go is a tour with real
// packets.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/pflag"
)

const usage = `Usage:
  nodeproxy run --manifests PATH [flags]      serve what the manifests say
  nodeproxy run --cleanup                     remove all rules and exit
  nodeproxy explain --manifests PATH ADDR:PORT[/PROTOCOL]
                                              tell what happens to a packet
  nodeproxy demo                              a tour with real packets, without root

"nodeproxy VERB --help" tells more. Without a verb, flags are those of run.
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := dispatch(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// errUsage is in errors of the command line, for which the exit status is 2.
var errUsage = errors.New("see --help")

// dispatch runs the verb that args begin with and returns the exit status.
func dispatch(ctx context.Context, args []string, out, diag io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(diag, usage)
		return 2
	}
	verb, rest := args[0], args[1:]
	if strings.HasPrefix(verb, "-") && verb != "-h" && verb != "--help" {
		verb, rest = "run", args
	}
	var err error
	switch verb {
	case "run":
		err = run(ctx, rest, out, diag)
	case "explain":
		err = explain(rest, out, diag)
	case "demo":
		return demo(ctx, rest, out, diag)
	case "help", "-h", "--help":
		fmt.Fprint(out, usage)
		return 0
	default:
		fmt.Fprintf(diag, "nodeproxy: no verb %q\n%s", verb, usage)
		return 2
	}
	switch {
	case err == nil || errors.Is(err, pflag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintf(diag, "nodeproxy %s: %v\n", verb, err)
		return 2
	}
	fmt.Fprintf(diag, "nodeproxy %s: %v\n", verb, err)
	return 1
}
