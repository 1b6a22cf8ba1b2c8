package config

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/examples/internal/textfile"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner"
)

const (
	drainFlag  = "ipvs-drain-limit"
	resetFlag  = "reset-connections-of-vanished-endpoints"
	readyzFlag = "readyz-bind-address"
	flavorFlag = "iptables-flavor"
)

// Config is a complete and valid configuration of the agent.
type Config struct {
	// Effective is the configuration with its defaults, as kube-proxy has it. The other
	// fields are derived from it, or from flags that it has no field for.
	Effective *v1alpha1.KubeProxyConfiguration
	// Flags is every flag of the command line with its value or default, "name=value",
	// sorted by name.
	Flags []string
	// Notes are warnings for the operator, such as options without effect.
	Notes []string

	// Manifests is the file or folder to read objects from, or "" for an API server.
	Manifests string
	Master    string
	// ConfigFile is the configuration file, or "" if flags were used.
	ConfigFile string
	// FileText is the content of the configuration file.
	FileText []byte
	// WithFile returns the configuration of the same command line with another content of the file.
	WithFile func(text []byte) (*Config, error)
	Adopt    bool
	// KubeProxyTable is when the agent, in mode nftables, keeps a table named like kube-proxy's.
	// "" is once it has taken over from kube-proxy's nftables mode.
	KubeProxyTable string
	InitOnly       bool
	SocketLB       SocketLB
	// Offload has the patterns of the interfaces between which mode nftables offloads
	// connections. Nil offloads none.
	Offload []string
	// ReadyzBindAddress is a further address and port of /livez and /readyz, or "".
	ReadyzBindAddress string
	// LogEverySync writes a line for each sync of changes from an API server.
	LogEverySync bool
	// Budget bounds the cost of Services.
	Budget ruleset.Budget
	// Annotations holds the names of the allowed annotations, without their prefix.
	Annotations []string
	// LogFile is the file that all output is appended to, or "". It is for Windows.
	LogFile string
	// TrafficMetrics enables metrics of each Service's traffic.
	TrafficMetrics bool
	// Flavor is the flavor of iptables in modes iptables and ipvs. AnyFlavor leaves the choice to the agent.
	Flavor iptables.Flavor
	// StartupTaint is the key of the taints that the agent removes from its Node when the rules are in
	// effect, or "".
	StartupTaint string
	// ResetVanished is how long after an endpoint vanished its TCP connections are ended. 0 means
	// never.
	ResetVanished time.Duration
	// DrainLimit bounds how long real servers drain in mode ipvs, and after a change from it; see
	// ipvs.Config for 0, which means no limit after a change.
	DrainLimit time.Duration

	Mode     string
	NodeName string
	// NodeNameFrom names the source of NodeName.
	NodeNameFrom string
	// BindAddress is the node's own address, or the zero Addr if it is not given.
	BindAddress netip.Addr
	// DetectLocal is how traffic of pods is recognized. It has no CIDRs in mode NodeCIDR:
	// they come from the Node object.
	DetectLocal ruleset.LocalTraffic
	NodePorts   ruleset.NodePortAddresses
	// PrimaryOnly reports that NodePorts are served only at the node's primary addresses.
	PrimaryOnly    bool
	MasqueradeAll  bool
	MasqueradeMark dataplane.MasqueradeMark

	// Gates are the feature gates that the agent honors. They do not change.
	Gates featuregate.MutableVersionedFeatureGate

	// SyncPeriod is how long to wait after a failed sync.
	SyncPeriod time.Duration
	// MinSyncPeriod is the least pause between syncs. Pace lengthens the pause by the
	// duration of the syncs, unless the pause was configured.
	MinSyncPeriod time.Duration
	Pace          runner.Pace
}

// Config validates the command line and returns its configuration. It reads the
// configuration file, if one is given.
func (fl *Flags) Config() (*Config, error) { return fl.ConfigWith(textfile.ReadConfig, os.Hostname) }

// ConfigWith is Config with functions that read the configuration file and the host's name.
func (fl *Flags) ConfigWith(read func(string) ([]byte, error), hostname func() (string, error)) (*Config, error) {
	flags := *fl
	c, err := fl.config(read, hostname)
	if err == nil {
		c.WithFile = func(text []byte) (*Config, error) {
			fl := flags
			return fl.config(func(string) ([]byte, error) { return text, nil }, hostname)
		}
	}
	return c, err
}

func (fl *Flags) config(read func(string) ([]byte, error), hostname func() (string, error)) (*Config, error) {
	k, err := fl.effective(read)
	if err != nil {
		return nil, err
	}
	out := &fl.out
	fl.VisitAll(func(f *pflag.Flag) { out.Flags = append(out.Flags, f.Name+"="+f.Value.String()) })
	slices.Sort(out.Flags)
	var notes []string
	if out.Gates, notes, err = setGates(k.FeatureGates, string(k.Mode)); err != nil {
		return nil, err
	}
	out.Notes = append(out.Notes, notes...)
	if !out.Gates.Enabled(logsapi.LoggingAlphaOptions) {
		// kube-proxy ignores these fields, and refuses the flags.
		ignore := func(format string, split *bool) {
			if *split && !fl.Changed("log-"+format+"-split-stream") {
				*split = false
				out.Notes = append(out.Notes, "logging.options."+format+".splitStream has no effect without the feature gate LoggingAlphaOptions")
			}
		}
		ignore("text", &k.Logging.Options.Text.SplitStream)
		ignore("json", &k.Logging.Options.JSON.SplitStream)
	}
	if err := validate(k, fl.system, out.Gates); err != nil {
		return nil, err
	}

	out.Effective, out.Mode = k, string(k.Mode)
	if out.ReadyzBindAddress != "" {
		v := &validator{}
		if v.listenAt(readyzFlag, out.ReadyzBindAddress); v.errs != nil {
			return nil, v.errs.ToAggregate()
		}
	}
	for _, pattern := range out.Offload {
		if _, err := path.Match(pattern, ""); err != nil {
			return nil, fmt.Errorf("--nftables-offload: %w: %q", err, pattern)
		}
	}
	if out.Budget, err = budget(fl.budget); err != nil {
		return nil, fmt.Errorf("--budget: %w", err)
	}
	if _, err := annotations.NewReader(out.Annotations); err != nil {
		return nil, fmt.Errorf("--allow-annotations: %w", err)
	}
	if out.SocketLB.Enabled && (out.Mode == ModeUserspace || out.Mode == ModeKernelspace) {
		return nil, fmt.Errorf("--socket-lb is not supported in mode %s", out.Mode)
	}
	if out.Mode == ModeKernelspace {
		if k.Winkernel.NetworkName = cmp.Or(k.Winkernel.NetworkName, fl.Network); k.Winkernel.NetworkName == "" {
			return nil, errors.New("--network-name is required, or winkernel.networkName in the configuration file, or the environment variable KUBE_NETWORK")
		}
	}
	if why := content.IsLabelKey(out.StartupTaint); out.StartupTaint != "" && len(why) != 0 {
		return nil, fmt.Errorf("--remove-startup-taint: %q: %s", out.StartupTaint, strings.Join(why, "; "))
	}
	if out.DrainLimit < 0 {
		return nil, fmt.Errorf("--%s is negative: %v", drainFlag, out.DrainLimit)
	}
	if out.ResetVanished < 0 {
		return nil, fmt.Errorf("--%s is negative: %v", resetFlag, out.ResetVanished)
	}
	if out.Mode != ModeNFTables && out.Mode != ModeIPTables {
		out.ResetVanished = 0
	}
	if out.Flavor != iptables.AnyFlavor && out.Mode != ModeIPTables && out.Mode != ModeIPVS {
		return nil, fmt.Errorf("--%s is for modes iptables and ipvs, and the mode is %s", flavorFlag, out.Mode)
	}
	// The kubelet derives the name of the Node in the same way.
	name := k.HostnameOverride
	out.NodeNameFrom = "--hostname-override"
	if fl.file != "" && !fl.Changed("hostname-override") {
		out.NodeNameFrom = "hostnameOverride in the configuration file"
	}
	if name == "" {
		out.NodeNameFrom = "the host's name"
		if name, err = hostname(); err != nil {
			return nil, fmt.Errorf("cannot read the host's name, and --hostname-override is not given: %w", err)
		}
	}
	if out.NodeName = strings.ToLower(strings.TrimSpace(name)); out.NodeName == "" && !fl.Named {
		return nil, fmt.Errorf("--hostname-override is empty")
	}
	if a, err := netip.ParseAddr(k.BindAddress); err == nil && !a.IsUnspecified() {
		out.BindAddress = a
	}
	switch k.DetectLocalMode {
	case ClusterCIDR:
		out.DetectLocal.CIDRs = new(validator).clusterCIDRs("clusterCIDR", k.ClusterCIDR)
	case BridgeInterface:
		out.DetectLocal.Bridge = k.DetectLocal.BridgeInterface
	case InterfaceNamePrefix:
		out.DetectLocal.InterfacePrefix = k.DetectLocal.InterfaceNamePrefix
	}
	if out.NodePorts, err = ruleset.ParseNodePortAddresses(k.NodePortAddresses); err != nil {
		return nil, err
	}
	out.noteLoopback()
	if err := out.selectLoopback(); err != nil {
		return nil, err
	}
	out.PrimaryOnly = len(k.NodePortAddresses) == 1 && k.NodePortAddresses[0] == "primary"
	bit := k.IPTables.MasqueradeBit
	out.MasqueradeAll = k.IPTables.MasqueradeAll
	if out.Mode == ModeNFTables {
		bit, out.MasqueradeAll = k.NFTables.MasqueradeBit, k.NFTables.MasqueradeAll
	}
	sync, least := periods(k)
	out.SyncPeriod, out.MinSyncPeriod = *sync, *least
	if !fl.paused {
		out.Pace = runner.Pace{Factor: paceFactor, Most: max(out.MinSyncPeriod, defaultMinSync)}
		if out.Mode != ModeIPTables {
			out.Pace.Burst = paceBurst
		}
		out.MinSyncPeriod = paceFloor
	}
	out.MasqueradeMark = 1 << *bit
	return out, nil
}

// periods returns the fields for syncPeriod and minSyncPeriod of the configured mode. An
// unknown mode, which validate rejects, has those of mode iptables.
func periods(c *v1alpha1.KubeProxyConfiguration) (sync, least *time.Duration) {
	switch c.Mode {
	case ModeNFTables:
		return &c.NFTables.SyncPeriod.Duration, &c.NFTables.MinSyncPeriod.Duration
	case ModeIPVS:
		return &c.IPVS.SyncPeriod.Duration, &c.IPVS.MinSyncPeriod.Duration
	}
	return &c.IPTables.SyncPeriod.Duration, &c.IPTables.MinSyncPeriod.Duration
}

// SocketLB configures the translation of connections at the socket.
type SocketLB struct {
	Enabled bool
	// Cgroup is the cgroup whose processes are served, or "" for all.
	Cgroup string
	// NodeOnly leaves pods to the rules of the mode.
	NodeOnly bool
	// Dir is the folder of the maps, or "" for the default. It has no flag.
	Dir string
}
