package agent

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/component-base/featuregate"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/textfile"
)

// Kubernetes is the newest release of Kubernetes whose kube-proxy the agent was compared with.
const Kubernetes = config.Kubernetes

// ErrConfig is wrapped by errors about a configuration. The error's text does not repeat it.
var ErrConfig = errors.New("invalid configuration")

// configError is an error that wraps ErrConfig.
type configError struct{ error }

func (configError) Is(target error) bool { return target == ErrConfig }

// Unwrap returns the error.
func (e configError) Unwrap() error { return e.error }

// Config is a complete and valid configuration of an Agent. It is immutable, and several Agents can
// share it.
type Config struct{ c *config.Config }

// ParseArgs returns the Config of a command line of kube-proxy, such as "--proxy-mode=nftables", with
// the flags of nodeproxy. It has a flag set of its own. read reads the file of --config; nil reads a
// regular file of at most 4 MiB.
//
// Flags that only a whole process can follow, such as those of logging, have no effect:
// [Config.Notes] names them. Flags that ask for another action, such as --cleanup, are errors.
func ParseArgs(args []string, read func(string) ([]byte, error)) (*Config, error) {
	if read == nil {
		read = textfile.ReadConfig
	}
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	f := AddFlags(set)
	set.SetOutput(io.Discard) // of warnings about deprecated flags
	if err := set.Parse(args); err != nil {
		return nil, configError{err}
	}
	if set.NArg() != 0 {
		return nil, configError{fmt.Errorf("%q is not a flag", set.Arg(0))}
	}
	for _, name := range []string{"cleanup", "init-only", "write-config-to"} {
		if set.Changed(name) {
			return nil, configError{fmt.Errorf("--%s is for command nodeproxy", name)}
		}
	}
	f.f.Named = true
	c, err := f.f.ConfigWith(read, func() (string, error) { return "", nil })
	if err != nil {
		return nil, configError{err}
	}
	set.Visit(func(flag *pflag.Flag) {
		if ofProcess(flag) {
			c.Notes = append(c.Notes, "--"+flag.Name+" has no effect: it is for a whole process")
		}
	})
	return &Config{c}, nil
}

// FromKubeProxy applies the defaults to a configuration of kube-proxy and returns its
// Config. Null, 0, false and "" are the same as a missing field, as in a file. args are
// flags without a field in the type, such as --budget.
func FromKubeProxy(k *v1alpha1.KubeProxyConfiguration, args ...string) (*Config, error) {
	text, err := config.Encode(k)
	if err != nil {
		return nil, configError{err}
	}
	const file = "the KubeProxyConfiguration"
	c, err := ParseArgs(append(slices.Clone(args), "--config="+file), func(string) ([]byte, error) { return text, nil })
	if err == nil {
		c.c.ConfigFile = "" // there is nothing to watch
	}
	return c, err
}

// ofProcess reports whether only a process can follow a flag.
func ofProcess(f *pflag.Flag) bool {
	return slices.Contains([]string{"log-file", "oom-score-adj", "profiling", "windows-service"}, f.Name) ||
		slices.Contains(f.Annotations[config.GroupAnnotation], "logging")
}

// Flags are the flags of an agent in the flag set of a program.
type Flags struct {
	// AsKubeProxy reports that the program was called as kube-proxy, which has another
	// default mode. Config.Notes then reports that.
	AsKubeProxy bool
	// Network is the default of --network-name.
	Network string

	f *config.Flags
}

// AddFlags adds the flags of kube-proxy and of nodeproxy to a flag set, which then keeps their order.
func AddFlags(to *pflag.FlagSet) *Flags { return &Flags{f: config.AddFlags(to)} }

// Config returns the Config of the flags, once they are parsed. It reads the file of --config. hostname
// returns the node's name if the flags do not have it.
func (f *Flags) Config(hostname func() (string, error)) (*Config, error) {
	f.f.AsKubeProxy, f.f.Network = f.AsKubeProxy, f.Network
	c, err := f.f.ConfigWith(textfile.ReadConfig, hostname)
	if err != nil {
		return nil, configError{err}
	}
	return &Config{c}, nil
}

// Effective returns a copy of the configuration in effect, for example for a page /configz.
func (c *Config) Effective() *v1alpha1.KubeProxyConfiguration { return c.c.Effective.DeepCopy() }

// Notes returns a sentence for each setting that has no effect, for the operator.
func (c *Config) Notes() []string { return slices.Clone(c.c.Notes) }

// NodeName returns the name of the node, or "" if the configuration does not have it.
func (c *Config) NodeName() string { return c.c.NodeName }

// Gates returns the feature gates that the agent follows. The caller must not change them.
func (c *Config) Gates() featuregate.MutableVersionedFeatureGate { return c.c.Gates }

// Write writes the configuration in effect to a file, complete or not at all.
func (c *Config) Write(path string) error { return c.c.Write(path) }

// of returns a copy of the configuration for a node. If node is "", it is the Config's.
func (c *Config) of(node string) (*config.Config, error) {
	out := *c.c
	if node != "" {
		out.NodeName, out.NodeNameFrom = strings.ToLower(strings.TrimSpace(node)), "the program"
	}
	if out.NodeName == "" {
		return nil, configError{errors.New("the node has no name")}
	}
	return &out, nil
}
