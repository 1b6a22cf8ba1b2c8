package config

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cliflag "k8s.io/component-base/cli/flag"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register" // adds the logging format json
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/examples/internal/annotations"
	"github.com/go-proxier/proxier/iptables"
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
	// fields has the field of the file that a flag stands for, by the name of a flag that stands for one.
	fields map[string]string
	// system is the operating system, as in runtime.GOOS.
	system string
}

// loggingFlags returns the fields that the flags of component-base's logging stand for.
func loggingFlags() map[string]string {
	return map[string]string{
		"logging-format":            "logging.format",
		"log-flush-frequency":       "logging.flushFrequency",
		"v":                         "logging.verbosity",
		"vmodule":                   "logging.vmodule",
		"log-text-split-stream":     "logging.options.text.splitStream",
		"log-text-info-buffer-size": "logging.options.text.infoBufferSize",
		"log-json-split-stream":     "logging.options.json.splitStream",
		"log-json-info-buffer-size": "logging.options.json.infoBufferSize",
	}
}

// ignored reports whether a flag is ignored because --config is given and the file has a
// field for it. The flags of logging and --hostname-override take precedence over the file.
func (fl *Flags) ignored(name string) bool {
	several := []string{"masquerade-all", "healthz-port", "metrics-port"}
	return fl.file != "" && loggingFlags()[name] == "" && name != "hostname-override" && (fl.fields[name] != "" || slices.Contains(several, name))
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
	fl := &Flags{
		FlagSet: to, system: system, fields: loggingFlags(), sync: 30 * time.Second, healthzPort: healthzPort, metricPort: metricsPort,
	}
	fl.SortFlags = false
	fl.SetNormalizeFunc(cliflag.WordSepNormalizeFunc) // --proxy_mode is --proxy-mode, as in kube-proxy
	c, own := &fl.kube, &fl.out
	setDefaults(c, system)
	c.NodePortAddresses = nil // the default depends on the mode
	modes := "nftables, iptables, ipvs or userspace (the agent copies data)"
	if fl.windows() {
		modes = "kernelspace, which programs Windows' Host Networking Service (HNS)"
		c.Winkernel.RootHnsEndpointName = "cbr0" // kube-proxy's default of the flag only
	}
	fl.group("nodeproxy's own", []flag{
		{"manifests", &own.Manifests, "read Services, EndpointSlices, Nodes and ServiceCIDRs from a `file`, or from a folder with .yaml, .yml and .json files, instead of an API server"},
		{"min-sync-period", &fl.minSync, "the least pause between syncs, in any mode; unless it or the field of the mode is set, as long as the last sync took, between " + paceFloor.String() + " and " + defaultMinSync.String()},
		{"sync-period", &fl.sync, "how long after a failed sync to retry it, in any mode; also how often to read the addresses of the node's interfaces"},
		{"service-traffic-metrics", &own.TrafficMetrics, "serve metrics of the traffic of each Service port, as far as the mode counts it; 1000 ports in each address family have their own series, and all others share one"},
		{"adopt-from-kube-proxy", &own.Adopt, "when the agent's rules are in effect and kube-proxy has ended, remove kube-proxy's rules"},
		{"kube-proxy-table", choice{&own.KubeProxyTable, []string{"adopted", TableAlways, TableNever}}, "`when` to keep an empty table kube-proxy, in mode nftables, for programs that look for kube-proxy's chains, such as Calico's Felix: always, adopted or never; adopted means after a take-over from kube-proxy's nftables mode or of a node without rules"},
		{"init-only", &own.InitOnly, "set all kernel parameters that the mode needs and exit; run then needs no writable /proc/sys"},
		{"socket-lb", &own.SocketLB.Enabled, "translate TCP connections and UDP datagrams of this node's processes and pods at the socket, by BPF programs; the rules of the mode serve all other traffic"},
		{"socket-lb-cgroup", &own.SocketLB.Cgroup, "the `folder` of the cgroup, version 2, whose processes --socket-lb serves; if empty, the root; in a container, where the host's /sys/fs/cgroup is mounted"},
		{"socket-lb-node-only", &own.SocketLB.NodeOnly, "do not translate connections of pods with --socket-lb, for meshes that redirect them in the pod"},
		{"nftables-offload", &own.Offload, "send established TCP connections of Services through a flowtable, in mode nftables, if they cross the node between interfaces whose names match one of the `patterns`, such as eth0,veth*; network policies see only their first packets"},
		{flavorFlag, choice{(*string)(&own.Flavor), Flavors()}, "the `flavor` of iptables, in modes iptables and ipvs: nft, legacy or auto, which chooses as kube-proxy's image does"},
		{drainFlag, &own.DrainLimit, "how long connections to a removed endpoint, or to an address that its Service has lost, may stay open, in mode ipvs and after a change from it; 0 means 15m for a lost address, and no limit for others; until then the node refuses new connections to the lost address"},
		{resetFlag, &own.ResetVanished, "how long after an endpoint vanished without terminating to end its TCP connections by RST, in modes nftables and iptables (0: never); pods that leave a Service by a change of their labels lose their connections, too"},
		{"remove-startup-taint", &own.StartupTaint, "the `key` of a taint that the agent removes from its Node when the rules are in effect"},
		{"allow-annotations", &own.Annotations, "the `names` of the annotations go-proxier.github.io/NAME that are in force: " + strings.Join(annotations.Known(), ", ")},
		{readyzFlag, &own.ReadyzBindAddress, "an `address` and port for /livez and /readyz besides --healthz-bind-address, which a kube-proxy that still runs has"},
		{"log-every-sync", &own.LogEverySync, "with an API server, write a line for each sync instead of one a minute"},
		{"budget", &fl.budget, "bounds of Services, as `BOUND=NUMBER`,...; 0 means none. " + budgetHelp()},
	})
	fl.group("from kube-proxy: objects, node and mode", []flag{
		{"kubeconfig", "clientConnection.kubeconfig", "the `file` with the address and credentials of the API server (if empty, the pod's service account)"},
		{"master", &own.Master, "the `URL` of the API server, overriding --kubeconfig"},
		{"config", &fl.file, "a kube-proxy configuration `file` (KubeProxyConfiguration, v1alpha1); flags that it has a field for are ignored. The agent exits when the file changes; its supervisor restarts it"},
		{"write-config-to", new(string), "write the effective configuration to a `file` and exit"},
		{"hostname-override", "hostnameOverride", "the `name` of this node, as in the Node object and in endpoints (if empty, the host's name)"},
		{"cleanup", new(bool), "remove all rules of every mode, and with --adopt-from-kube-proxy kube-proxy's, and exit"},
		{"proxy-mode", "mode", "the data plane: " + modes},
		{"detect-local-mode", "detectLocalMode", "how traffic of this node's pods is recognized: ClusterCIDR, NodeCIDR (the Node object's podCIDRs), BridgeInterface or InterfaceNamePrefix"},
		{"cluster-cidr", "clusterCIDR", "the `CIDRs` of the cluster's pods, at most one in each address family, for ClusterCIDR"},
		{"pod-bridge-interface", "detectLocal.bridgeInterface", "the bridge that pods are attached to, for BridgeInterface"},
		{"pod-interface-name-prefix", "detectLocal.interfaceNamePrefix", "the prefix of the names of pods' interfaces, for InterfaceNamePrefix"},
		{"masquerade-all", &fl.masqueradeAll, "masquerade all traffic to cluster IPs"},
		{"nodeport-addresses", "nodePortAddresses", "the node's addresses at which NodePorts answer: those in some `CIDRs`, primary (those of the Node object, or else of the default routes), all (except loopback addresses) or localhost; if empty, primary in mode nftables and all in other modes"},
		{"bind-address", "bindAddress", "the node's own primary `address`, if it is neither 0.0.0.0 nor :: (nothing listens there)"},
		{"feature-gates", "featureGates", "feature gates of kube-proxy, as `NAME=BOOL`,...; a gate that selects unsupported behavior is an error"},
	})
	if fl.windows() {
		fl.group("from kube-proxy: Windows", []flag{
			{"network-name", "winkernel.networkName", "the `name` of the HNS network with the pods' endpoints; if empty, the environment variable KUBE_NETWORK"},
			{"source-vip", "winkernel.sourceVip", "the source `address` of connections to other nodes, which an overlay network needs"},
			{"enable-dsr", "winkernel.enableDSR", "let replies from cluster IPs pass by the load balancer (direct server return)"},
			{"forward-healthcheck-vip", "winkernel.forwardHealthCheckVip", "forward health checks of load-balancer IPs to the node"},
			{"root-hnsendpoint-name", "winkernel.rootHnsEndpointName", "the `name` of the HNS endpoint of the node itself, for --forward-healthcheck-vip"},
			{"windows-service", "windowsRunAsService", "run as a Windows service; a service of Windows does so without this flag"},
			{"log-file", &own.LogFile, "append everything that the agent writes to a `file`; without it a Windows service writes to the event log"},
		})
	}
	fl.group("from kube-proxy: health, metrics and profiles", []flag{
		{"healthz-bind-address", "healthzBindAddress", "the `address` and port of /healthz and /livez (empty: no server)"},
		{"metrics-bind-address", "metricsBindAddress", "the `address` and port of /metrics, /proxyMode and /configz (empty: no server)"},
		{"bind-address-hard-fail", "bindAddressHardFail", "exit if the agent cannot listen at one of these addresses, instead of retrying"},
		{"profiling", "enableProfiling", "serve /debug/pprof with the metrics, and let PUT /debug/flags/v change --v"},
	})
	fl.group("from kube-proxy: connection tracking and the process", []flag{
		{"conntrack-max-per-core", "conntrack.maxPerCore", "the limit of tracked connections for each CPU (0: unchanged); a higher limit of the kernel is lowered"},
		{"conntrack-min", "conntrack.min", "the least limit of tracked connections, unless --conntrack-max-per-core is 0"},
		{"conntrack-tcp-timeout-established", "conntrack.tcpEstablishedTimeout", "how long an idle TCP connection is tracked (0: unchanged)"},
		{"conntrack-tcp-timeout-close-wait", "conntrack.tcpCloseWaitTimeout", "how long a TCP connection in state CLOSE_WAIT is tracked (0: unchanged)"},
		{"conntrack-tcp-be-liberal", "conntrack.tcpBeLiberal", "do not treat TCP packets outside of the window as invalid"},
		{"conntrack-udp-timeout", "conntrack.udpTimeout", "how long a UDP flow without replies is tracked (0: unchanged)"},
		{"conntrack-udp-timeout-stream", "conntrack.udpStreamTimeout", "how long a UDP flow with replies is tracked (0: unchanged)"},
		{"oom-score-adj", "oomScoreAdj", "the oom_score_adj of this process, -1000 to 1000"},
	})
	fl.group("from kube-proxy: mode iptables", []flag{
		{"iptables-masquerade-bit", "iptables.masqueradeBit", "the bit of the packet mark that requests masquerading, in modes iptables and ipvs"},
		{"iptables-localhost-nodeports", "iptables.localhostNodePorts", "serve NodePorts at IPv4 loopback addresses, in mode iptables"},
		{"iptables-sync-period", "iptables.syncPeriod", "--sync-period in mode iptables"},
		{"iptables-min-sync-period", "iptables.minSyncPeriod", "--min-sync-period in mode iptables"},
	})
	fl.group("from kube-proxy: mode ipvs", []flag{
		{"ipvs-scheduler", "ipvs.scheduler", "the scheduler, in mode ipvs"},
		{"ipvs-exclude-cidrs", "ipvs.excludeCIDRs", "`CIDRs` whose virtual servers belong to other programs, in mode ipvs"},
		{"ipvs-strict-arp", "ipvs.strictARP", "set arp_ignore to 1 and arp_announce to 2, in mode ipvs"},
		{"ipvs-sync-period", "ipvs.syncPeriod", "--sync-period in mode ipvs"},
		{"ipvs-min-sync-period", "ipvs.minSyncPeriod", "--min-sync-period in mode ipvs"},
		{"ipvs-tcp-timeout", "ipvs.tcpTimeout", "how long an idle TCP connection is kept, in mode ipvs (0: unchanged)"},
		{"ipvs-tcpfin-timeout", "ipvs.tcpFinTimeout", "how long a TCP connection is kept after a FIN, in mode ipvs (0: unchanged)"},
		{"ipvs-udp-timeout", "ipvs.udpTimeout", "how long a UDP flow is kept, in mode ipvs (0: unchanged)"},
	})
	fl.group("from kube-proxy: requests to the API server", []flag{
		{"kube-api-content-type", "clientConnection.contentType", "the `encoding` that requests to the API server accept"},
		{"kube-api-qps", "clientConnection.qps", "the limit of requests a second to the API server"},
		{"kube-api-burst", "clientConnection.burst", "how many requests to the API server may exceed --kube-api-qps for a short time"},
	})
	fl.group("from kube-proxy: without effect, or deprecated", []flag{
		{"config-sync-period", "configSyncPeriod", "has no effect: the API server reports every change"},
		{"show-hidden-metrics-for-version", "showHiddenMetricsForVersion", "has no effect: no metric is hidden"},
		{"healthz-port", &fl.healthzPort, "the port of --healthz-bind-address if the address has none; 0 for no server"},
		{"metrics-port", &fl.metricPort, "the port of --metrics-bind-address if the address has none; 0 for no server"},
		{"proxy-port-range", "portRange", ""},
	})
	for name, instead := range map[string]string{
		"healthz-port": "use --healthz-bind-address", "metrics-port": "use --metrics-bind-address", "proxy-port-range": "it has no effect",
	} {
		if err := fl.MarkDeprecated(name, instead); err != nil {
			panic(err) // it was added above
		}
	}
	logsapi.AddFlags(&c.Logging, to)
	for name := range loggingFlags() {
		fl.annotate(name, "logging")
	}
	return fl
}

// flag is a row of the table of flags. value is the path of the field of the file that the flag stands for, or where
// the value is stored, with its default.
type flag struct {
	name  string
	value any
	usage string
}

// group adds flags under a title.
func (fl *Flags) group(title string, list []flag) {
	for _, f := range list {
		if path, ok := f.value.(string); ok {
			fl.fields[f.name] = path
			v := fieldAt(&fl.kube, path)
			if v.Kind() != reflect.Pointer {
				v = v.Addr()
			}
			f.value = v.Interface()
		}
		switch p := f.value.(type) {
		case *bool:
			fl.BoolVar(p, f.name, *p, f.usage)
		case *int:
			fl.IntVar(p, f.name, *p, f.usage)
		case *int32:
			fl.Int32Var(p, f.name, *p, f.usage)
		case *float32:
			fl.Float32Var(p, f.name, *p, f.usage)
		case *string:
			fl.StringVar(p, f.name, *p, f.usage)
		case *v1alpha1.ProxyMode:
			fl.StringVar((*string)(p), f.name, string(*p), f.usage)
		case *v1alpha1.LocalMode:
			fl.StringVar((*string)(p), f.name, string(*p), f.usage)
		case *[]string:
			fl.StringSliceVar(p, f.name, *p, f.usage)
		case *time.Duration:
			fl.DurationVar(p, f.name, *p, f.usage)
		case *metav1.Duration:
			fl.DurationVar(&p.Duration, f.name, p.Duration, f.usage)
		case *map[string]bool:
			fl.Var(cliflag.NewMapStringBool(p), f.name, f.usage)
		case *map[string]int:
			fl.StringToIntVar(p, f.name, *p, f.usage)
		case pflag.Value:
			fl.Var(p, f.name, f.usage)
		default:
			panic(fmt.Sprintf("--%s has the type %T", f.name, p))
		}
		fl.annotate(f.name, title)
	}
}

func (fl *Flags) annotate(name, title string) {
	if err := fl.SetAnnotation(name, GroupAnnotation, []string{title}); err != nil {
		panic(err) // it was added before
	}
}

func (fl *Flags) windows() bool { return fl.system == "windows" }

func (fl *Flags) note(format string, args ...any) {
	fl.out.Notes = append(fl.out.Notes, fmt.Sprintf(format, args...))
}

func (fl *Flags) effective(read func(string) ([]byte, error)) (*v1alpha1.KubeProxyConfiguration, error) {
	given := map[string]bool{}
	fl.Visit(func(f *pflag.Flag) { given[f.Name] = true })
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
		for name, path := range loggingFlags() {
			if given[name] {
				to, from := fieldAt(c, path), fieldAt(&fl.kube, path)
				if name == "vmodule" {
					from = reflect.AppendSlice(from, to) // the first pattern that matches counts
				}
				to.Set(from)
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

// The values of Config.KubeProxyTable except "", with which the agent keeps the table once it has taken over from
// kube-proxy's nftables mode.
const (
	TableAlways = "always"
	TableNever  = "never"
)

// Flavors returns the values of --iptables-flavor. The first one leaves the choice to the agent.
func Flavors() []string { return []string{"auto", string(iptables.NFT), string(iptables.Legacy)} }

// choice is a flag's value that is one of some names. The first name stands for "".
type choice struct {
	value *string
	names []string
}

// String returns the name of the value.
func (c choice) String() string { return cmp.Or(*c.value, c.names[0]) }

// Set sets the value by its name.
func (c choice) Set(name string) error {
	switch slices.Index(c.names, name) {
	case -1:
		return fmt.Errorf("must be one of %s", strings.Join(c.names, ", "))
	case 0:
		name = ""
	}
	*c.value = name
	return nil
}

// Type is the name of the type in the help text.
func (c choice) Type() string { return "name" }
