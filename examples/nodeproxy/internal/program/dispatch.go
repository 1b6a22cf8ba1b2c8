// Package program is nodeproxy's main function. Package wholeagent tests it.
package program

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/demo"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/inspect"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/run"
)

// Main runs the program and returns its exit status.
func Main() int {
	if code, ran := runAsService(os.Args); ran {
		return code
	}
	ctx, release := UntilSignal()
	p := newProgram(os.Args[0])
	p.Restrict = func(log *slog.Logger, keep []int, prepare func(modules bool)) {
		run.DropPrivileges(log, keep, prepare, release)
	}
	return Dispatch(ctx, p, os.Args[1:])
}

// UntilSignal returns a context that SIGINT and SIGTERM end. release stops that: from then on these
// signals end the process. It reports whether none came before. It may be called once.
func UntilSignal() (ctx context.Context, release func() bool) {
	ctx, end := context.WithCancel(context.Background())
	caught, relayed := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(caught, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		defer close(relayed)
		for range caught {
			end()
		}
	}()
	return ctx, func() bool {
		signal.Stop(caught) // returns after all signals so far are in caught
		close(caught)
		<-relayed
		return ctx.Err() == nil
	}
}

// newProgram returns the program of this process, which was called by a name.
func newProgram(name string) *cli.Program {
	return &cli.Program{
		Out: os.Stdout, Diag: os.Stderr, Process: true,
		AsKubeProxy: strings.TrimSuffix(filepath.Base(name), ".exe") == "kube-proxy",
	}
}

// Dispatch runs the verb that args begin with and returns the exit status.
func Dispatch(ctx context.Context, p *cli.Program, args []string) int {
	defer klog.Flush() // --log-text-info-buffer-size buffers messages
	root := newRoot(p)
	args = withVerb(p, args)
	if len(args) == 0 {
		cli.WriteHelp(p.Diag, root)
		return 2
	}
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	var status cli.StatusError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return int(status)
	case c == root: // not a verb
		fmt.Fprintf(p.Diag, "nodeproxy: no verb %q", args[0])
		if near := root.SuggestionsFor(args[0]); len(near) > 0 {
			fmt.Fprintf(p.Diag, "; did you mean %s?", strings.Join(near, " or "))
		}
		fmt.Fprintln(p.Diag)
		cli.WriteHelp(p.Diag, root)
		return 2
	}
	if !errors.Is(err, cli.ErrLogged) {
		fmt.Fprintf(cli.Lines{W: p.Diag}, "%s: %v\n", c.CommandPath(), err)
	}
	if errors.Is(err, cli.ErrUsage) {
		return 2
	}
	return 1
}

// withVerb returns args with the verb that they leave out: run, if they begin with a flag, or if
// the program was called as kube-proxy.
func withVerb(p *cli.Program, args []string) []string {
	if len(args) == 0 {
		if p.AsKubeProxy {
			return []string{"run"}
		}
		return nil
	}
	switch first := args[0]; {
	case first == "--version":
		return []string{"version"}
	case first == cobra.ShellCompRequestCmd || first == cobra.ShellCompNoDescRequestCmd:
		return append([]string{first}, withVerb(p, args[1:])...)
	case strings.HasPrefix(first, "-") && first != "-h" && first != "--help":
		return append([]string{"run"}, args...)
	}
	return args
}

// The groups of verbs.
const (
	groupServe = "serve"
	groupLook  = "look"
	groupOther = "other"
)

func newRoot(p *cli.Program) *cobra.Command {
	root := &cobra.Command{
		Use:   "nodeproxy VERB [flags]",
		Short: "a Service proxy for a node, in kube-proxy's place",
		Long: `Serves Kubernetes Services on a node, in kube-proxy's place.

"nodeproxy VERB --help" prints the details. If the first argument is a flag, the verb is run.`,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp) // unless AddFlags says otherwise
	root.SetOut(p.Out)
	root.SetErr(p.Diag)
	root.SetHelpFunc(func(c *cobra.Command, _ []string) { cli.WriteHelp(p.Out, c) })
	root.SetUsageFunc(func(c *cobra.Command) error { cli.WriteHelp(p.Diag, c); return nil })
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return cli.Bad("%w", err) })
	root.AddGroup(
		&cobra.Group{ID: groupServe, Title: "Serve:"},
		&cobra.Group{ID: groupLook, Title: "Look at a node:"},
		&cobra.Group{ID: groupOther, Title: "Other:"},
	)
	root.SetHelpCommandGroupID(groupOther)
	root.SetCompletionCommandGroupID(groupOther)
	add := func(group string, verbs ...*cobra.Command) {
		for _, c := range verbs {
			c.GroupID = group
			c.DisableFlagsInUseLine = true
			c.ValidArgsFunction = cobra.NoFileCompletions
			root.AddCommand(c)
		}
	}
	add(groupServe, run.Command(p))
	add(groupLook, inspect.ExplainCommand(p), inspect.RenderCommand(p), inspect.TraceCommand(p), inspect.TopCommand(p), demo.Command(p))
	add(groupOther, &cobra.Command{
		Use: "version", Short: "print the version",
		Run: func(*cobra.Command, []string) { fmt.Fprintln(p.Out, cli.VersionLine()) },
	}, &cobra.Command{
		Use: "man DIR", Short: "write manual pages for all verbs into a folder",
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return cli.Bad("%d arguments instead of 1", len(args))
			}
			return cli.WriteMan(args[0], root)
		},
	})
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	return root
}
