// Package cli has what the verbs of nodeproxy share: command lines, help texts, manual pages,
// errors and logs.
package cli

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/component-base/featuregate"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/node/config"
)

// ErrUsage is wrapped by errors of the command line. Their exit status is 2.
var ErrUsage = errors.New("see --help")

// Bad returns an error that wraps ErrUsage.
func Bad(format string, args ...any) error {
	return fmt.Errorf("%w: %w", fmt.Errorf(format, args...), ErrUsage)
}

// AddFlags adds the flags of run to a verb. Other flags may be added to the verb.
func (p *Program) AddFlags(c *cobra.Command) *config.Flags {
	f := config.AddFlags(c.Flags())
	f.Network = os.Getenv("KUBE_NETWORK")
	p.CompleteFlags(c)
	return f
}

// CompleteFlags makes shells complete the values of the flags of run, which a verb has.
func (p *Program) CompleteFlags(c *cobra.Command) {
	f := c.Flags()
	f.SetOutput(p.Diag) // of warnings about deprecated flags
	for name, values := range map[string][]string{
		"proxy-mode":        {config.ModeNFTables, config.ModeIPTables, config.ModeIPVS, config.ModeUserspace},
		"detect-local-mode": {config.ClusterCIDR, config.NodeCIDR, config.BridgeInterface, config.InterfaceNamePrefix},
		"logging-format":    {"text", "json"},
		"iptables-flavor":   config.Flavors(),
		"kube-proxy-table":  {config.TableAlways, "adopted", config.TableNever},
	} {
		Complete(c, name, values...)
	}
	f.VisitAll(func(flag *pflag.Flag) {
		if value, _ := pflag.UnquoteUsage(flag); value == "file" || value == "folder" {
			completeWith(c, flag.Name, cobra.ShellCompDirectiveDefault) // names of files
		}
	})
}

// Complete makes shells complete the value of a flag from a list.
func Complete(c *cobra.Command, flag string, values ...string) {
	completeWith(c, flag, cobra.ShellCompDirectiveNoFileComp, values...)
}

func completeWith(c *cobra.Command, flag string, how cobra.ShellCompDirective, values ...string) {
	if err := c.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, how)); err != nil {
		panic(err) // the flag exists, and has no completion yet
	}
}

// Configure returns the configuration of a command line whose flags are parsed, and which must
// have n arguments besides flags.
func Configure(flags *config.Flags, n int) (*config.Config, error) {
	if flags.NArg() != n {
		return nil, Bad("%d arguments instead of %d", flags.NArg(), n)
	}
	c, err := flags.Config()
	if err != nil {
		return nil, Bad("%w", err)
	}
	return c, nil
}

// ErrLogged is wrapped by errors that are in the log already.
var ErrLogged = errors.New("logged")

// StatusError is the exit status of a verb that has printed what failed. 0 is no error.
type StatusError int

func (e StatusError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// Version returns the program's version from the build information.
func Version() string {
	if i, ok := debug.ReadBuildInfo(); ok && i.Main.Version != "" {
		return i.Main.Version
	}
	return "(devel)"
}

// VersionLine returns the output of the verb version: the version, which names the commit if the program was built
// from a repository, and the release of Kubernetes whose kube-proxy it follows.
func VersionLine() string {
	return fmt.Sprintf("nodeproxy %s, follows Kubernetes %s, %s %s/%s", Version(), config.Kubernetes, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// Program holds what the verbs share.
type Program struct {
	Out, Diag io.Writer
	// NetNS is an open file of the network namespace that run serves; nil is that of the process.
	NetNS *os.File
	// Restrict drops all capabilities except those in keep. If it drops any, it first calls
	// prepare and tells it whether CAP_SYS_MODULE is among them. It is nil if the program
	// shares its process, as in tests.
	Restrict func(log *slog.Logger, keep []int, prepare func(modules bool))
	// Process allows the program to set up logging for the whole process.
	Process bool
	// AsKubeProxy reports that the program was called as kube-proxy, in whose place it then
	// is: the verb is run even without flags, and kube-proxy's rules are adopted.
	AsKubeProxy bool
}

// Logger returns the logger that the configuration selects.
// With a file, that of --log-file, all further output goes to it, until the process ends.
func (p *Program) Logger(c *v1alpha1.KubeProxyConfiguration, gates featuregate.FeatureGate, file string) (*slog.Logger, error) {
	if file != "" {
		f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			return nil, fmt.Errorf("cannot open --log-file: %w", err)
		}
		p.Out, p.Diag = f, f
	}
	if p.Process {
		return processLogger(&c.Logging, gates, p.Out, p.Diag)
	}
	return ownLogger(&c.Logging, p.Diag), nil
}
