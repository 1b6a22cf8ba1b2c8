package main

import (
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// options is what the command line says.
type options struct {
	manifests         string
	hostname          string
	proxyMode         string
	localMode         string
	clusterCIDRs      []string
	bridge            string
	interfacePrefix   string
	masqueradeAll     bool
	nodePortAddresses []string
	minSyncPeriod     time.Duration
	syncPeriod        time.Duration
	cleanup           bool
	verbosity         int

	// What follows is made of the above by validate.

	// local is nil if the Node object has to tell the node's pod ranges.
	local     *ruleset.LocalTraffic
	nodePorts ruleset.NodePortAddresses
}

// The values of --detect-local-mode.
const (
	clusterCIDR         = "ClusterCIDR"
	nodeCIDR            = "NodeCIDR"
	bridgeInterface     = "BridgeInterface"
	interfaceNamePrefix = "InterfaceNamePrefix"
)

// worldFlags adds the flags that say how Services are to be treated.
func (o *options) worldFlags(f *pflag.FlagSet) {
	f.StringVar(&o.manifests, "manifests", "", "a `file`, or a folder with .yaml, .yml and .json files, of Services, EndpointSlices, Nodes and ServiceCIDRs, as YAML or JSON, alone or in Lists")
	f.StringVar(&o.hostname, "hostname-override", "", "the `name` of this node, as in the Node object and in endpoints; the host's name if empty")
	f.StringVar(&o.localMode, "detect-local-mode", clusterCIDR, "how traffic of this node's pods is recognised: ClusterCIDR, NodeCIDR (the Node object's podCIDRs), BridgeInterface or InterfaceNamePrefix")
	f.StringSliceVar(&o.clusterCIDRs, "cluster-cidr", nil, "the `CIDRs` of the cluster's pods, one in each address family at most; without it ClusterCIDR recognises nothing")
	f.StringVar(&o.bridge, "pod-bridge-interface", "", "the bridge that pods are attached to, for BridgeInterface")
	f.StringVar(&o.interfacePrefix, "pod-interface-name-prefix", "", "how the names of the interfaces of pods begin, for InterfaceNamePrefix")
	f.BoolVar(&o.masqueradeAll, "masquerade-all", false, "replace the source address of everything sent to cluster IPs")
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", []string{"primary"}, "the node's addresses at which NodePorts answer: those in some `CIDRs`, or primary: those of the Node object, or else the source addresses of the default routes")
}

// runFlags returns the flags of run.
func (o *options) runFlags(diag io.Writer) *pflag.FlagSet {
	f := newFlagSet("run", diag, `Usage: nodeproxy run --manifests PATH [flags]

Programs the network namespace it runs in with nftables, as the manifests say,
and follows their changes. Rules stay in effect when it ends. Bad documents are
logged with file and line, and skipped.

Standard output gets a line for each change of the manifests that is in effect:
  synced services=2 endpoints=5 changed=1 took=412.3µs
services is the number of Services with a port to serve; endpoints that of the
endpoints this node may send to, added up over their ports in each address family;
changed that of the ports, in each address family, whose rules are different; took
the time from the last object handed in to the kernel's commit; and failed, if
there, the number of ports that could not be programmed, which is tried again.

`)
	o.worldFlags(f)
	f.StringVar(&o.proxyMode, "proxy-mode", "nftables", "what to program: nftables")
	f.DurationVar(&o.minSyncPeriod, "min-sync-period", time.Second, "how long to wait between syncs at least")
	f.DurationVar(&o.syncPeriod, "sync-period", 30*time.Second, "how long after a sync that failed it is tried again, and how often the node's addresses are looked up if no Node object tells them")
	f.BoolVar(&o.cleanup, "cleanup", false, "remove all rules and exit")
	f.IntVarP(&o.verbosity, "v", "v", 2, "how much to log: 0 errors only, 1 warnings, 2 what an operator wants to know, 4 everything")
	return f
}

func newFlagSet(verb string, diag io.Writer, usage string) *pflag.FlagSet {
	f := pflag.NewFlagSet(verb, pflag.ContinueOnError)
	f.SetOutput(diag)
	f.SortFlags = false
	f.Usage = func() { fmt.Fprintf(diag, "%sFlags:\n%s", usage, f.FlagUsages()) }
	return f
}

// bad returns an errUsage.
func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %w", fmt.Errorf(format, args...), errUsage)
}

// validateRun checks what the flags of run say together. Its errors are errUsage.
func (o *options) validateRun() error {
	if o.proxyMode != "nftables" {
		return bad("--proxy-mode %q is not nftables", o.proxyMode)
	}
	if o.cleanup {
		return nil
	}
	if o.syncPeriod <= 0 {
		return bad("--sync-period (%v) must be positive", o.syncPeriod)
	}
	if o.minSyncPeriod < 0 || o.minSyncPeriod > o.syncPeriod {
		return bad("--min-sync-period (%v) must not be negative, or longer than --sync-period (%v)", o.minSyncPeriod, o.syncPeriod)
	}
	return o.validate()
}

// validate checks what the flags of the world say together. Its errors are
// errUsage.
func (o *options) validate() error {
	if o.manifests == "" {
		return bad("--manifests is required")
	}
	var err error
	if o.nodePorts, err = ruleset.ParseNodePortAddresses(o.nodePortAddresses); err != nil {
		return bad("--nodeport-addresses: %w", err)
	}
	if err := o.validateLocal(); err != nil {
		return err
	}
	if o.hostname == "" {
		if o.hostname, err = os.Hostname(); err != nil {
			return bad("--hostname-override is needed: %w", err)
		}
	}
	// As kubelets do, which give nodes their names.
	o.hostname = strings.ToLower(strings.TrimSpace(o.hostname))
	if o.hostname == "" {
		return bad("--hostname-override is empty")
	}
	return nil
}

// validateLocal makes o.local of what the flags say.
func (o *options) validateLocal() error {
	var cidrs []netip.Prefix
	for _, s := range o.clusterCIDRs {
		c, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return bad("--cluster-cidr: %w", err)
		}
		family := tracker.FamilyOf(c.Addr())
		if slices.ContainsFunc(cidrs, func(o netip.Prefix) bool { return tracker.FamilyOf(o.Addr()) == family }) {
			return bad("--cluster-cidr has more than one %v CIDR", family)
		}
		cidrs = append(cidrs, c.Masked())
	}
	switch o.localMode {
	case clusterCIDR:
		o.local = &ruleset.LocalTraffic{CIDRs: cidrs}
	case nodeCIDR:
		o.local = nil
	case bridgeInterface:
		if o.bridge == "" {
			return bad("--detect-local-mode %s needs --pod-bridge-interface", o.localMode)
		}
		o.local = &ruleset.LocalTraffic{Bridge: o.bridge}
	case interfaceNamePrefix:
		if o.interfacePrefix == "" {
			return bad("--detect-local-mode %s needs --pod-interface-name-prefix", o.localMode)
		}
		o.local = &ruleset.LocalTraffic{InterfacePrefix: o.interfacePrefix}
	default:
		return bad("--detect-local-mode %q is not %s, %s, %s or %s", o.localMode,
			clusterCIDR, nodeCIDR, bridgeInterface, interfaceNamePrefix)
	}
	return nil
}

// parse reads a command line with n arguments besides flags.
func parse(flags *pflag.FlagSet, args []string, n int) error {
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("%w: %w", err, errUsage)
	}
	if flags.NArg() != n {
		return bad("%d arguments instead of %d", flags.NArg(), n)
	}
	return nil
}

// logger returns where to log, as -v says.
func (o *options) logger(diag io.Writer) *slog.Logger {
	level := slog.LevelInfo
	switch {
	case o.verbosity <= 0:
		level = slog.LevelError
	case o.verbosity == 1:
		level = slog.LevelWarn
	case o.verbosity >= 4:
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(diag, &slog.HandlerOptions{Level: level}))
}
