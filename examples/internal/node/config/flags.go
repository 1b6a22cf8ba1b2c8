package config

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // adds the logging format json
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/annotations"
)

// Flags is a command line. Call Parse once, then Config once.
type Flags struct {
	*pflag.FlagSet
	// AsKubeProxy reports that the program was called as kube-proxy, whose default mode is another.
	AsKubeProxy bool
	// Network is the default of --network-name: the environment variable KUBE_NETWORK.
	Network string
	// Named reports that the program names the node, unless --hostname-override is given.
	Named bool

	kube v1alpha1.KubeProxyConfiguration // the values of the flags, with defaults
	out  Config

	file                    string
	masqueradeAll           bool
	healthzPort, metricPort int
	sync, minSync           time.Duration
	budget                  map[string]int
	// paused reports that the mode's minSyncPeriod was configured.
	paused bool
	// system is the operating system, as in runtime.GOOS.
	system string
}

// loggingFlags returns, for each flag of component-base's logging, a function that
// copies the flag's field from one configuration to another.
func loggingFlags() map[string]func(to, from *logsapi.LoggingConfiguration) {
	type logging = *logsapi.LoggingConfiguration
	return map[string]func(to, from logging){
		"logging-format":      func(to, from logging) { to.Format = from.Format },
		"log-flush-frequency": func(to, from logging) { to.FlushFrequency = from.FlushFrequency },
		"v":                   func(to, from logging) { to.Verbosity = from.Verbosity },
		// The first pattern that matches counts.
		"vmodule":                   func(to, from logging) { to.VModule = slices.Concat(from.VModule, to.VModule) },
		"log-text-split-stream":     func(to, from logging) { to.Options.Text.SplitStream = from.Options.Text.SplitStream },
		"log-text-info-buffer-size": func(to, from logging) { to.Options.Text.InfoBufferSize = from.Options.Text.InfoBufferSize },
		"log-json-split-stream":     func(to, from logging) { to.Options.JSON.SplitStream = from.Options.JSON.SplitStream },
		"log-json-info-buffer-size": func(to, from logging) { to.Options.JSON.InfoBufferSize = from.Options.JSON.InfoBufferSize },
	}
}

// ignored reports whether a flag is ignored because --config is given and the file has a
// field for it. The flags of logging and --hostname-override take precedence over the file.
func (fl *Flags) ignored(name string) bool {
	several := []string{"masquerade-all", "healthz-port", "metrics-port"}
	return fl.file != "" && loggingFlags()[name] == nil && name != "hostname-override" && (flagFields()[name] != "" || slices.Contains(several, name))
}

// NewFlags returns the flags of a verb in a set of their own.
func NewFlags(verb string) *Flags {
	return AddFlags(pflag.NewFlagSet(verb, pflag.ContinueOnError))
}

// AddFlags adds the flags that all verbs share to a set, whose flags it no longer sorts. Other
// flags may be added to the set.
func AddFlags(to *pflag.FlagSet) *Flags { return addFlags(to, runtime.GOOS) }

// GroupAnnotation is the annotation of a flag that help texts show under a title. Flags with
// the same title follow each other.
const GroupAnnotation = "nodeproxy-group"

func addFlags(to *pflag.FlagSet, system string) *Flags {
	fl := &Flags{FlagSet: to, system: system}
	fl.SortFlags = false
	fl.SetNormalizeFunc(cliflag.WordSepNormalizeFunc) // --proxy_mode is --proxy-mode, as in kube-proxy
	c := &fl.kube
	setDefaults(c, system)
	c.NodePortAddresses = nil // the default depends on the mode
	fl.addOwn()
	fl.addNode()
	fl.addServers()
	fl.addConntrack()
	fl.addModes()
	fl.addClient()
	fl.group("logging", func(f *pflag.FlagSet) { logsapi.AddFlags(&c.Logging, f) })
	return fl
}

// group adds the flags that add defines, under a title.
func (fl *Flags) group(title string, add func(*pflag.FlagSet)) {
	f := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.SortFlags = false
	add(f)
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Annotations == nil {
			flag.Annotations = map[string][]string{}
		}
		flag.Annotations[GroupAnnotation] = []string{title}
		fl.AddFlag(flag)
	})
}

// addOwn adds the flags that kube-proxy does not have.
func (fl *Flags) addOwn() {
	fl.group("nodeproxy's own", func(f *pflag.FlagSet) {
		f.StringVar(&fl.out.Manifests, "manifests", "", "read Services, EndpointSlices, Nodes and ServiceCIDRs from a `file`, or from a folder with .yaml, .yml and .json files, instead of an API server")
		f.DurationVar(&fl.minSync, "min-sync-period", 0, "the least pause between syncs, in any mode; unless it or the field of the mode is set, as long as the last sync took, between "+paceFloor.String()+" and "+defaultMinSync.String())
		f.DurationVar(&fl.sync, "sync-period", 30*time.Second, "how long after a failed sync to retry it, in any mode; also how often to read the addresses of the node's interfaces")
		f.BoolVar(&fl.out.TrafficMetrics, "service-traffic-metrics", false, "serve metrics of the traffic of each Service port, as far as the mode counts it; 1000 ports in each address family have their own series, and all others share one")
		f.BoolVar(&fl.out.Adopt, "adopt-from-kube-proxy", false, "when the agent's rules are in effect and kube-proxy has ended, remove kube-proxy's rules")
		f.Var(choice[KubeProxyTable]{&fl.out.KubeProxyTable, []string{"adopted", string(TableAlways), string(TableNever)}}, "kube-proxy-table", "`when` to keep an empty table kube-proxy, in mode nftables, for programs that look for kube-proxy's chains, such as Calico's Felix: always, adopted or never; adopted means after a take-over from kube-proxy's nftables mode or of a node without rules")
		f.BoolVar(&fl.out.InitOnly, "init-only", false, "set all kernel parameters that the mode needs and exit; run then needs no writable /proc/sys")
		f.BoolVar(&fl.out.SocketLB.Enabled, "socket-lb", false, "translate TCP connections and UDP datagrams of this node's processes and pods at the socket, by BPF programs; the rules of the mode serve all other traffic")
		f.StringVar(&fl.out.SocketLB.Cgroup, "socket-lb-cgroup", "", "the `folder` of the cgroup, version 2, whose processes --socket-lb serves; if empty, the root; in a container, where the host's /sys/fs/cgroup is mounted")
		f.BoolVar(&fl.out.SocketLB.NodeOnly, "socket-lb-node-only", false, "do not translate connections of pods with --socket-lb, for meshes that redirect them in the pod")
		f.StringSliceVar(&fl.out.Offload, "nftables-offload", nil, "send established TCP connections of Services through a flowtable, in mode nftables, if they cross the node between interfaces whose names match one of the `patterns`, such as eth0,veth*; network policies see only their first packets")
		f.Var(choice[Flavor]{&fl.out.Flavor, []string{"auto", string(FlavorNFT), string(FlavorLegacy)}}, flavorFlag, "the `flavor` of iptables, in modes iptables and ipvs: nft, legacy or auto, which chooses as kube-proxy's image does")
		f.DurationVar(&fl.out.DrainLimit, drainFlag, 0, "how long connections to a removed endpoint, or to an address that its Service has lost, may stay open, in mode ipvs and after a change from it; 0 means 15m for a lost address, and no limit for others; until then the node refuses new connections to the lost address")
		f.DurationVar(&fl.out.ResetVanished, resetFlag, 0, "how long after an endpoint vanished without terminating to end its TCP connections by RST, in modes nftables and iptables (0: never); pods that leave a Service by a change of their labels lose their connections, too")
		f.StringVar(&fl.out.StartupTaint, "remove-startup-taint", "", "the `key` of a taint that the agent removes from its Node when the rules are in effect")
		f.StringSliceVar(&fl.out.Annotations, "allow-annotations", nil, "the `names` of the annotations go-proxier.github.io/NAME that are in force: "+strings.Join(annotations.Known(), ", "))
		f.StringVar(&fl.out.ReadyzBindAddress, readyzFlag, "", "an `address` and port for /livez and /readyz besides --healthz-bind-address, which a kube-proxy that still runs has")
		f.BoolVar(&fl.out.LogEverySync, "log-every-sync", false, "with an API server, write a line for each sync instead of one a minute")
		f.StringToIntVar(&fl.budget, "budget", nil, "bounds of Services, as `BOUND=NUMBER`,...; 0 means none. "+budgetHelp())
	})
}

// addNode adds the flags that say what the node is and how its Services are served.
func (fl *Flags) addNode() {
	c := &fl.kube
	fl.group("from kube-proxy: objects, node and mode", func(f *pflag.FlagSet) {
		f.StringVar(&c.ClientConnection.Kubeconfig, "kubeconfig", "", "the `file` with the address and credentials of the API server (if empty, the pod's service account)")
		f.StringVar(&fl.out.Master, "master", "", "the `URL` of the API server, overriding --kubeconfig")
		f.StringVar(&fl.file, "config", "", "a kube-proxy configuration `file` (KubeProxyConfiguration, v1alpha1); flags that it has a field for are ignored. The agent exits when the file changes; its supervisor restarts it")
		f.String("write-config-to", "", "write the effective configuration to a `file` and exit")
		f.StringVar(&c.HostnameOverride, "hostname-override", "", "the `name` of this node, as in the Node object and in endpoints (if empty, the host's name)")
		f.Bool("cleanup", false, "remove all rules of every mode, and with --adopt-from-kube-proxy kube-proxy's, and exit")
		if fl.windows() {
			f.StringVar((*string)(&c.Mode), "proxy-mode", ModeKernelspace, "the data plane: kernelspace, which programs Windows' Host Networking Service (HNS)")
		} else {
			f.StringVar((*string)(&c.Mode), "proxy-mode", ModeNFTables, "the data plane: nftables, iptables, ipvs or userspace (the agent copies data)")
		}
		f.StringVar((*string)(&c.DetectLocalMode), "detect-local-mode", ClusterCIDR, "how traffic of this node's pods is recognized: ClusterCIDR, NodeCIDR (the Node object's podCIDRs), BridgeInterface or InterfaceNamePrefix")
		f.StringVar(&c.ClusterCIDR, "cluster-cidr", "", "the `CIDRs` of the cluster's pods, at most one in each address family, for ClusterCIDR")
		f.StringVar(&c.DetectLocal.BridgeInterface, "pod-bridge-interface", "", "the bridge that pods are attached to, for BridgeInterface")
		f.StringVar(&c.DetectLocal.InterfaceNamePrefix, "pod-interface-name-prefix", "", "the prefix of the names of pods' interfaces, for InterfaceNamePrefix")
		f.BoolVar(&fl.masqueradeAll, "masquerade-all", false, "masquerade all traffic to cluster IPs")
		f.StringSliceVar(&c.NodePortAddresses, "nodeport-addresses", nil, "the node's addresses at which NodePorts answer: those in some `CIDRs`, primary (those of the Node object, or else of the default routes), all (except loopback addresses) or localhost; if empty, primary in mode nftables and all in other modes")
		f.StringVar(&c.BindAddress, "bind-address", c.BindAddress, "the node's own primary `address`, if it is neither 0.0.0.0 nor :: (nothing listens there)")
		f.Var(cliflag.NewMapStringBool(&c.FeatureGates), "feature-gates", "feature gates of kube-proxy, as `NAME=BOOL`,...; a gate that selects unsupported behavior is an error")
	})
	if fl.windows() {
		fl.addWindows()
	}
}

func (fl *Flags) addServers() {
	c := &fl.kube
	fl.group("from kube-proxy: health, metrics and profiles", func(f *pflag.FlagSet) {
		f.StringVar(&c.HealthzBindAddress, "healthz-bind-address", "0.0.0.0:10256", "the `address` and port of /healthz and /livez (empty: no server)")
		f.StringVar(&c.MetricsBindAddress, "metrics-bind-address", "127.0.0.1:10249", "the `address` and port of /metrics, /proxyMode and /configz (empty: no server)")
		f.BoolVar(&c.BindAddressHardFail, "bind-address-hard-fail", false, "exit if the agent cannot listen at one of these addresses, instead of retrying")
		f.BoolVar(&c.EnableProfiling, "profiling", false, "serve /debug/pprof with the metrics, and let PUT /debug/flags/v change --v")
	})
}

// addConntrack adds the flags of kernel parameters.
func (fl *Flags) addConntrack() {
	c := &fl.kube
	fl.group("from kube-proxy: connection tracking and the process", func(f *pflag.FlagSet) {
		ct := &c.Conntrack
		f.Int32Var(ct.MaxPerCore, "conntrack-max-per-core", *ct.MaxPerCore, "the limit of tracked connections for each CPU (0: unchanged); a higher limit of the kernel is lowered")
		f.Int32Var(ct.Min, "conntrack-min", *ct.Min, "the least limit of tracked connections, unless --conntrack-max-per-core is 0")
		f.DurationVar(&ct.TCPEstablishedTimeout.Duration, "conntrack-tcp-timeout-established", ct.TCPEstablishedTimeout.Duration, "how long an idle TCP connection is tracked (0: unchanged)")
		f.DurationVar(&ct.TCPCloseWaitTimeout.Duration, "conntrack-tcp-timeout-close-wait", ct.TCPCloseWaitTimeout.Duration, "how long a TCP connection in state CLOSE_WAIT is tracked (0: unchanged)")
		f.BoolVar(&ct.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "do not treat TCP packets outside of the window as invalid")
		f.DurationVar(&ct.UDPTimeout.Duration, "conntrack-udp-timeout", 0, "how long a UDP flow without replies is tracked (0: unchanged)")
		f.DurationVar(&ct.UDPStreamTimeout.Duration, "conntrack-udp-timeout-stream", 0, "how long a UDP flow with replies is tracked (0: unchanged)")
		f.Int32Var(c.OOMScoreAdj, "oom-score-adj", *c.OOMScoreAdj, "the oom_score_adj of this process, -1000 to 1000")
	})
}

func (fl *Flags) addModes() {
	c := &fl.kube
	fl.group("from kube-proxy: mode iptables", func(f *pflag.FlagSet) {
		f.Int32Var(c.IPTables.MasqueradeBit, "iptables-masquerade-bit", 14, "the bit of the packet mark that requests masquerading, in modes iptables and ipvs")
		f.BoolVar(c.IPTables.LocalhostNodePorts, "iptables-localhost-nodeports", true, "serve NodePorts at IPv4 loopback addresses, in mode iptables")
		f.DurationVar(&c.IPTables.SyncPeriod.Duration, "iptables-sync-period", 30*time.Second, "--sync-period in mode iptables")
		f.DurationVar(&c.IPTables.MinSyncPeriod.Duration, "iptables-min-sync-period", defaultMinSync, "--min-sync-period in mode iptables")
	})
	fl.group("from kube-proxy: mode ipvs", func(f *pflag.FlagSet) {
		f.StringVar(&c.IPVS.Scheduler, "ipvs-scheduler", "rr", "the scheduler, in mode ipvs")
		f.StringSliceVar(&c.IPVS.ExcludeCIDRs, "ipvs-exclude-cidrs", nil, "`CIDRs` whose virtual servers belong to other programs, in mode ipvs")
		f.BoolVar(&c.IPVS.StrictARP, "ipvs-strict-arp", false, "set arp_ignore to 1 and arp_announce to 2, in mode ipvs")
		f.DurationVar(&c.IPVS.SyncPeriod.Duration, "ipvs-sync-period", 30*time.Second, "--sync-period in mode ipvs")
		f.DurationVar(&c.IPVS.MinSyncPeriod.Duration, "ipvs-min-sync-period", 0, "--min-sync-period in mode ipvs")
		f.DurationVar(&c.IPVS.TCPTimeout.Duration, "ipvs-tcp-timeout", 0, "how long an idle TCP connection is kept, in mode ipvs (0: unchanged)")
		f.DurationVar(&c.IPVS.TCPFinTimeout.Duration, "ipvs-tcpfin-timeout", 0, "how long a TCP connection is kept after a FIN, in mode ipvs (0: unchanged)")
		f.DurationVar(&c.IPVS.UDPTimeout.Duration, "ipvs-udp-timeout", 0, "how long a UDP flow is kept, in mode ipvs (0: unchanged)")
	})
}

// addClient adds the flags of the client of the API server, and those without effect.
func (fl *Flags) addClient() {
	c := &fl.kube
	fl.group("from kube-proxy: requests to the API server", func(f *pflag.FlagSet) {
		f.StringVar(&c.ClientConnection.ContentType, "kube-api-content-type", protobuf, "the `encoding` that requests to the API server accept")
		f.Float32Var(&c.ClientConnection.QPS, "kube-api-qps", 5, "the limit of requests a second to the API server")
		f.Int32Var(&c.ClientConnection.Burst, "kube-api-burst", 10, "how many requests to the API server may exceed --kube-api-qps for a short time")
	})
	fl.group("from kube-proxy: without effect, or deprecated", func(f *pflag.FlagSet) {
		f.DurationVar(&c.ConfigSyncPeriod.Duration, "config-sync-period", 15*time.Minute, "has no effect: the API server reports every change")
		f.StringVar(&c.ShowHiddenMetricsForVersion, "show-hidden-metrics-for-version", "", "has no effect: no metric is hidden")
		f.IntVar(&fl.healthzPort, "healthz-port", healthzPort, "the port of --healthz-bind-address if the address has none; 0 for no server")
		f.IntVar(&fl.metricPort, "metrics-port", metricsPort, "the port of --metrics-bind-address if the address has none; 0 for no server")
		f.StringVar(&c.PortRange, "proxy-port-range", "", "")
		for name, instead := range map[string]string{
			"healthz-port": "use --healthz-bind-address", "metrics-port": "use --metrics-bind-address", "proxy-port-range": "it has no effect",
		} {
			if err := f.MarkDeprecated(name, instead); err != nil {
				panic(err) // it was added above
			}
		}
	})
}

func (fl *Flags) windows() bool { return fl.system == "windows" }

func (fl *Flags) addWindows() {
	w := &fl.kube.Winkernel
	fl.group("from kube-proxy: Windows", func(f *pflag.FlagSet) {
		f.StringVar(&w.NetworkName, "network-name", "", "the `name` of the HNS network with the pods' endpoints; if empty, the environment variable KUBE_NETWORK")
		f.StringVar(&w.SourceVip, "source-vip", "", "the source `address` of connections to other nodes, which an overlay network needs")
		f.BoolVar(&w.EnableDSR, "enable-dsr", false, "let replies from cluster IPs pass by the load balancer (direct server return)")
		f.BoolVar(&w.ForwardHealthCheckVip, "forward-healthcheck-vip", false, "forward health checks of load-balancer IPs to the node")
		f.StringVar(&w.RootHnsEndpointName, "root-hnsendpoint-name", defaultRootEndpoint, "the `name` of the HNS endpoint of the node itself, for --forward-healthcheck-vip")
		f.BoolVar(&fl.kube.WindowsRunAsService, "windows-service", false, "run as a Windows service; a service of Windows does so without this flag")
		f.StringVar(&fl.out.LogFile, "log-file", "", "append everything that the agent writes to a `file`; without it a Windows service writes to the event log")
	})
}

func (fl *Flags) note(format string, args ...any) {
	fl.out.Notes = append(fl.out.Notes, fmt.Sprintf(format, args...))
}

func (fl *Flags) effective(read func(string) ([]byte, error)) (*v1alpha1.KubeProxyConfiguration, error) {
	given := map[string]bool{}
	fl.Visit(func(f *pflag.Flag) { given[f.Name] = true })
	if given["master"] && fl.out.Manifests != "" {
		fl.note("--master has no effect, since --manifests is given")
	}
	c := &fl.kube
	var fileFields []string
	if fl.file != "" {
		var err error
		if c, err = fl.readFile(read); err != nil {
			return nil, err
		}
		fileFields = setFields(c)
		if c.Mode == "" {
			fl.noteDefaultMode("the configuration file names no mode", c)
		}
		setDefaults(c, fl.system)
		if given["hostname-override"] {
			c.HostnameOverride = fl.kube.HostnameOverride
		}
		for name, apply := range loggingFlags() {
			if given[name] {
				apply(&c.Logging, &fl.kube.Logging)
			}
		}
	} else {
		if c.Mode == "" {
			fl.noteDefaultMode("--proxy-mode is empty", c)
		} else if fl.AsKubeProxy && !given["proxy-mode"] {
			fl.noteDefaultMode("--proxy-mode is not given", c)
		}
		fl.completeFlags(c, given)
	}
	// Set only the mode in use, so that one of the two flags alone does not violate the
	// defaults of another mode.
	sync, least := periods(c)
	if given["sync-period"] {
		*sync = fl.sync
	}
	if given["min-sync-period"] {
		*least = fl.minSync
	}
	mode := string(c.Mode)
	fl.paused = given["min-sync-period"] || fl.file == "" && given[mode+"-min-sync-period"] ||
		slices.Contains(fileFields, mode+".minSyncPeriod")
	fl.noteNoEffect(c, fileFields, given)
	if strings.ContainsAny(c.ClusterCIDR, " \t\n") {
		fl.note("clusterCIDR %q has a blank, which kube-proxy refuses", c.ClusterCIDR)
	}
	if c.Mode == ModeUserspace && fl.file != "" {
		fl.note("mode userspace is nodeproxy's own: kube-proxy has refused it since Kubernetes 1.26")
	}
	return c, nil
}

func (fl *Flags) readFile(read func(string) ([]byte, error)) (*v1alpha1.KubeProxyConfiguration, error) {
	text, err := read(fl.file)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	files, err := newCodec()
	if err != nil {
		return nil, err
	}
	c, notes, err := files.decode(text)
	if err != nil {
		return nil, fmt.Errorf("--config: %s: %w", fl.file, err)
	}
	fl.out.ConfigFile, fl.out.FileText = fl.file, text
	fl.out.Notes = append(fl.out.Notes, notes...)
	fl.Visit(func(f *pflag.Flag) {
		if fl.ignored(f.Name) {
			fl.note("--%s is ignored, since --config is given", f.Name)
		}
	})
	return c, nil
}

// noteDefaultMode adds a note about a missing mode, as in files that kubeadm writes, and about
// the effect of the default on NodePorts. c has no defaults yet.
func (fl *Flags) noteDefaultMode(what string, c *v1alpha1.KubeProxyConfiguration) {
	if fl.windows() {
		return // kube-proxy's default is the same
	}
	where := "only at the node's primary addresses, not at its other addresses or at localhost"
	if len(c.NodePortAddresses) != 0 {
		where = "at the addresses in nodePortAddresses, and at localhost only if these contain it"
	}
	fl.note("%s: mode %s is used, where kube-proxy's default is %s, and NodePorts answer %s", what, ModeNFTables, ModeIPTables, where)
}

// completeFlags sets the defaults, and the fields of flags that stand for several fields.
func (fl *Flags) completeFlags(c *v1alpha1.KubeProxyConfiguration, given map[string]bool) {
	c.IPTables.MasqueradeAll, c.NFTables.MasqueradeAll = fl.masqueradeAll, fl.masqueradeAll
	var off []*string
	for _, s := range []struct {
		addrFlag, portFlag string
		port               int
		addr               *string
	}{
		{"healthz-bind-address", "healthz-port", fl.healthzPort, &c.HealthzBindAddress},
		{"metrics-bind-address", "metrics-port", fl.metricPort, &c.MetricsBindAddress},
	} {
		if !given[s.addrFlag] {
			// The default of /healthz depends on --bind-address: a server at 0.0.0.0 has no IPv6.
			// That of the metrics does not, as in kube-proxy, unless a file has bindAddress.
			*s.addr = ""
			if s.addrFlag == "metrics-bind-address" {
				*s.addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(metricsPort))
			}
		}
		_, err := netip.ParseAddr(*s.addr)
		switch {
		case given[s.addrFlag] && *s.addr == "" || given[s.portFlag] && s.port == 0:
			off = append(off, s.addr)
		case given[s.portFlag] && err == nil:
			*s.addr = net.JoinHostPort(*s.addr, strconv.Itoa(s.port))
		case given[s.portFlag]:
			// As in kube-proxy, where the default address has a port too.
			fl.note("--%s has no effect unless it is 0 or --%s is an address without a port", s.portFlag, s.addrFlag)
		}
	}
	periods := []time.Duration{c.IPTables.MinSyncPeriod.Duration, c.NFTables.MinSyncPeriod.Duration}
	logging := c.Logging
	setDefaults(c, fl.system)
	// setDefaults must not replace 0 and "" that were given.
	c.Logging = logging
	c.IPTables.MinSyncPeriod.Duration, c.NFTables.MinSyncPeriod.Duration = periods[0], periods[1]
	for _, addr := range off {
		*addr = ""
	}
}

// KubeProxyTable is when the agent keeps a table named like that of kube-proxy's nftables mode,
// with one empty chain, for programs that look for it. The zero value is TableAdopted.
type KubeProxyTable string

// The values of KubeProxyTable.
const (
	// TableAdopted keeps it once the agent has taken over from kube-proxy's nftables mode.
	TableAdopted KubeProxyTable = ""
	TableAlways  KubeProxyTable = "always"
	TableNever   KubeProxyTable = "never"
)

// Flavor is one of the kernel's two implementations of iptables. The zero value is FlavorAuto.
type Flavor string

// The values of Flavor.
const (
	// FlavorAuto leaves the choice to the agent. Where no choice is made, it is the flavor of the
	// programs without a flavor in their names.
	FlavorAuto   Flavor = ""
	FlavorNFT    Flavor = "nft"
	FlavorLegacy Flavor = "legacy"
)

// choice is a flag's value that is one of some names. The first name stands for "".
type choice[T ~string] struct {
	value *T
	names []string
}

// String returns the name of the value.
func (c choice[T]) String() string { return cmp.Or(string(*c.value), c.names[0]) }

// Set sets the value by its name.
func (c choice[T]) Set(name string) error {
	switch i := slices.Index(c.names, name); i {
	case -1:
		return fmt.Errorf("must be one of %s", strings.Join(c.names, ", "))
	case 0:
		*c.value = ""
	default:
		*c.value = T(name)
	}
	return nil
}

// Type is the name of the type in the help text.
func (c choice[T]) Type() string { return "name" }
