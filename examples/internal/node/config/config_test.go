package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
	zpages "k8s.io/component-base/zpages/features"
	"k8s.io/kube-proxy/config/v1alpha1"

	"github.com/go-proxier/proxier/internal/testing/fuzzseed"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/runner"
)

func hostname() (string, error) { return " Node-A\n", nil }

// of returns the configuration of a command line.
func of(t *testing.T, args ...string) *Config {
	t.Helper()
	c, err := parse(args...)
	if err != nil {
		t.Fatalf("%q: %v", args, err)
	}
	return c
}

func parse(args ...string) (*Config, error) {
	fl := NewFlags("run")
	if err := fl.Parse(args); err != nil {
		return nil, err
	}
	return fl.config(os.ReadFile, hostname)
}

// TestDefaultsAreKubeProxys compares the defaults with the ones that kube-proxy documents.
func TestDefaultsAreKubeProxys(t *testing.T) {
	c := of(t)
	e := c.Effective
	for what, ok := range map[string]bool{
		"mode":             c.Mode == "nftables",
		"node":             c.NodeName == "node-a",
		"bind address":     e.BindAddress == "0.0.0.0" && !c.BindAddress.IsValid(),
		"healthz":          e.HealthzBindAddress == "0.0.0.0:10256",
		"metrics":          e.MetricsBindAddress == "127.0.0.1:10249",
		"oom":              *e.OOMScoreAdj == -999,
		"periods":          c.SyncPeriod == 30*time.Second && e.NFTables.MinSyncPeriod.Duration == time.Second,
		"ipvs periods":     e.IPVS.SyncPeriod.Duration == 30*time.Second && e.IPVS.MinSyncPeriod.Duration == 0,
		"conntrack":        *e.Conntrack.MaxPerCore == 32768 && *e.Conntrack.Min == 131072 && e.Conntrack.UDPTimeout.Duration == 0,
		"timeouts":         e.Conntrack.TCPEstablishedTimeout.Duration == 24*time.Hour && e.Conntrack.TCPCloseWaitTimeout.Duration == time.Hour,
		"masquerade":       c.MasqueradeMark == 1<<14 && !c.MasqueradeAll,
		"NodePorts":        c.PrimaryOnly && len(e.NodePortAddresses) == 1,
		"local":            e.DetectLocalMode == "ClusterCIDR" && c.DetectLocal.CIDRs == nil,
		"localhost":        *e.IPTables.LocalhostNodePorts,
		"client":           e.ClientConnection.ContentType == "application/vnd.kubernetes.protobuf" && e.ClientConnection.QPS == 5 && e.ClientConnection.Burst == 10,
		"logging":          e.Logging.Format == "text" && e.Logging.Verbosity == 0,
		"nothing to note":  len(c.Notes) == 0,
		"configSyncPeriod": e.ConfigSyncPeriod.Duration == 15*time.Minute,
	} {
		if !ok {
			t.Errorf("%s: %+v", what, e)
		}
	}
	six := of(t, "--bind-address", "2001:db8::1").Effective
	if six.HealthzBindAddress != "[::]:10256" || six.MetricsBindAddress != "127.0.0.1:10249" {
		t.Errorf("IPv6: %s %s", six.HealthzBindAddress, six.MetricsBindAddress)
	}
	if c := of(t, "--proxy-mode", "iptables"); c.PrimaryOnly || c.Effective.NodePortAddresses != nil {
		t.Errorf("iptables: NodePorts at %q", c.Effective.NodePortAddresses)
	}
}

// TestPauseFollowsSyncsUnlessConfigured checks that Pace is set unless the mode's minSyncPeriod
// is configured. kubeadm's files do not configure it.
func TestPauseFollowsSyncsUnlessConfigured(t *testing.T) {
	file := func(text string) []string { return []string{"--config", write(t, t.TempDir(), header+text)} }
	for name, args := range map[string][]string{
		"defaults":             nil,
		"ipvs":                 {"--proxy-mode=ipvs"},
		"iptables":             {"--proxy-mode=iptables"},
		"another mode's flag":  {"--proxy-mode=nftables", "--iptables-min-sync-period=5s"},
		"kubeadm":              {"--config", "testdata/kubeadm.yaml"},
		"0 in the file":        file("mode: nftables\nnftables: {minSyncPeriod: 0s}\n"),
		"another mode's field": file("mode: nftables\niptables: {minSyncPeriod: 5s}\n"),
	} {
		c := of(t, args...)
		want := runner.Pace{Factor: paceFactor, Most: time.Second, Burst: paceBurst}
		if c.Mode == ModeIPTables {
			want.Burst = 0
		}
		if c.MinSyncPeriod != paceFloor || c.Pace != want {
			t.Errorf("%s: MinSyncPeriod %v, Pace %+v", name, c.MinSyncPeriod, c.Pace)
		}
	}
	for name, args := range map[string][]string{
		"flag of any mode": {"--min-sync-period=3s"},
		"flag of the mode": {"--proxy-mode=iptables", "--iptables-min-sync-period=3s"},
		"field":            file("mode: nftables\nnftables: {minSyncPeriod: 3s}\n"),
		"field and flag":   append(file("mode: nftables\n"), "--min-sync-period=3s"),
	} {
		if c := of(t, args...); c.MinSyncPeriod != 3*time.Second || c.Pace != (runner.Pace{}) {
			t.Errorf("%s: MinSyncPeriod %v, Pace %+v", name, c.MinSyncPeriod, c.Pace)
		}
	}
	if c := of(t, "--min-sync-period=0"); c.MinSyncPeriod != 0 || c.Pace != (runner.Pace{}) {
		t.Errorf("no pause: MinSyncPeriod %v, Pace %+v", c.MinSyncPeriod, c.Pace)
	}
}

func TestFlagsSetTheConfiguration(t *testing.T) {
	c := of(t, "--hostname-override", "B", "--proxy-mode=ipvs", "--ipvs-sync-period=7s", "--ipvs-min-sync-period", "2s", "--iptables-masquerade-bit=3",
		"--healthz-bind-address=", "--metrics-bind-address=127.0.0.2", "--metrics-port=9", "--cluster-cidr", "10.1.2.3/16, fd00::1/48", "--masquerade-all",
		"--bind-address=192.0.2.1", "--conntrack-udp-timeout=5s", "--iptables-sync-period=9s", "--feature-gates=NFTablesProxyMode=true,AllAlpha=false")
	e := c.Effective
	if c.NodeName != "b" || c.SyncPeriod != 7*time.Second || c.MinSyncPeriod != 2*time.Second || c.MasqueradeMark != 1<<3 || !c.MasqueradeAll ||
		e.HealthzBindAddress != "" || e.MetricsBindAddress != "127.0.0.2:9" || c.BindAddress != netip.MustParseAddr("192.0.2.1") ||
		len(c.DetectLocal.CIDRs) != 2 || c.DetectLocal.CIDRs[0].String() != "10.1.0.0/16" || e.Conntrack.UDPTimeout.Duration != 5*time.Second {
		t.Errorf("%+v\n%+v", c, e)
	}
	wantNotes(t, c, "--iptables-sync-period has no effect in mode ipvs",
		`clusterCIDR "10.1.2.3/16, fd00::1/48" has a blank, which kube-proxy refuses`, "feature gates that are fixed here: NFTablesProxyMode=true")
	if c := of(t, "--manifests", "x", "--kubeconfig", "y"); len(c.Notes) != 1 || !strings.Contains(c.Notes[0], "--kubeconfig has no effect, since --manifests is given") {
		t.Errorf("notes: %q", c.Notes)
	}
	if c := of(t, "--proxy_mode", "iptables"); c.Mode != ModeIPTables {
		t.Errorf("--proxy_mode: mode %s", c.Mode)
	}
	if c := of(t, "--min-sync-period=0", "--sync-period=2s"); c.MinSyncPeriod != 0 || c.SyncPeriod != 2*time.Second {
		t.Errorf("periods: %v %v", c.MinSyncPeriod, c.SyncPeriod)
	}
}

// TestBadValuesAreRejectedByName has invalid values and unsupported options.
func TestBadValuesAreRejectedByName(t *testing.T) {
	dir := t.TempDir()
	for _, tt := range []struct{ args, want string }{
		{"--proxy-mode kernelspace", "mode: Invalid value"},
		{"--proxy-mode Nftables", "must be nftables, iptables, ipvs"},
		{"--proxy-mode iptables --iptables-masquerade-bit 32", "iptables.masqueradeBit: Invalid value: 32"},
		{"--proxy-mode ipvs --iptables-masquerade-bit 32", "iptables.masqueradeBit: Invalid value: 32"},
		{"--sync-period 0", "nftables.syncPeriod"},
		{"--min-sync-period 1m", "nftables.minSyncPeriod"},
		{"--oom-score-adj 1001", "oomScoreAdj"},
		{"--bind-address here", "bindAddress: Invalid value: \"here\": must be a valid IP address"},
		{"--bind-address fe80::1%eth0", "bindAddress: Invalid value"},
		{"--bind-address 192.0.2.01", "bindAddress: Invalid value: \"192.0.2.01\": must not have leading 0s"},
		{"--bind-address ::ffff:192.0.2.1", "bindAddress: Invalid value: \"::ffff:192.0.2.1\": must not be an IPv4-mapped IPv6 address"},
		{"--healthz-bind-address 1.2.3.4:99999", "healthzBindAddress"},
		{"--healthz-bind-address 1.2.3.4:0", "healthzBindAddress: Invalid value: \"1.2.3.4:0\": must have a port from 1 to 65535"},
		{"--healthz-bind-address [fe80::1%eth0]:80", "healthzBindAddress: Invalid value"},
		{"--healthz-bind-address 1.2.3.4 --healthz-port 65536", "healthzBindAddress"},
		{"--metrics-bind-address :80", "metricsBindAddress"},
		{"--metrics-bind-address localhost", "metricsBindAddress"},
		{"--nodeport-addresses 10.0.0.0", "nodePortAddresses"},
		{"--nodeport-addresses 10.0.0.01/8", "nodePortAddresses"},
		{"--nodeport-addresses ::ffff:10.0.0.0/104", "nodePortAddresses"},
		{"--cluster-cidr 10.0.0.0/8,10.1.0.0/16", "clusterCIDR: Invalid value: \"10.0.0.0/8,10.1.0.0/16\": more than one IPv4 CIDR"},
		{"--cluster-cidr fd00::/200", "clusterCIDR"},
		{"--cluster-cidr 010.0.0.0/8", "clusterCIDR: Invalid value: \"010.0.0.0/8\": must not have leading 0s"},
		{"--cluster-cidr 10.0.0.0/08", "clusterCIDR: Invalid value: \"10.0.0.0/08\": must not have leading 0s"},
		{"--cluster-cidr ::ffff:10.0.0.0/104", "clusterCIDR: Invalid value: \"::ffff:10.0.0.0/104\": must not have an IPv4-mapped IPv6 address"},
		{"--detect-local-mode Guess", "detectLocalMode: Invalid value: \"Guess\""},
		{"--detect-local-mode BridgeInterface", "detectLocal.bridgeInterface"},
		{"--detect-local-mode InterfaceNamePrefix", "detectLocal.interfaceNamePrefix"},
		{"--conntrack-min=-1", "conntrack.min"},
		{"--conntrack-udp-timeout=-1s", "conntrack.udpTimeout"},
		{"--proxy-mode ipvs --ipvs-exclude-cidrs x", "ipvs.excludeCIDRs[0]"},
		{"--proxy-mode ipvs --ipvs-exclude-cidrs 10.0.0.0/8,::ffff:10.0.0.0/104", "ipvs.excludeCIDRs[1]"},
		{"--proxy-mode ipvs --ipvs-tcp-timeout=-1s", "ipvs.tcpTimeout"},
		{"--kube-api-burst=-1", "clientConnection.burst"},
		{"--proxy-mode ipvs --ipvs-drain-limit=-1s", "is negative: -1s"},
		{"--nftables-offload veth[", "--nftables-offload"},
		{"--iptables-flavor legacy", "--iptables-flavor"},
		{"--proxy-mode userspace --iptables-flavor nft", "--iptables-flavor"},
		{"--proxy-mode iptables --iptables-flavor old", "--iptables-flavor"},
		{"--hostname-override \u00a0", "--hostname-override is empty"},
		{"--feature-gates Fly-ing=true", "unrecognized feature gate \"Fly-ing\""},
		{"--feature-gates =true", "unrecognized feature gate \"\""},
		{"--feature-gates AllowServiceExternalIP=false", "unrecognized feature gate \"AllowServiceExternalIP\": no release of Kubernetes from 1.20 to 1.37 has it"},
		{"--feature-gates allowserviceexternalips=false", "unrecognized feature gate"},
		{"--feature-gates #=false", "unrecognized feature gate"},
		{"--feature-gates ProxyTerminatingEndpoints=false", "ProxyTerminatingEndpoints=false is not supported"},
		{"--nodeport-addresses localhost,primary,localhost", "\"localhost\" occurs twice"},
		{"--feature-gates KubeProxyIPVS=false --proxy-mode ipvs", "mode ipvs is disabled by the feature gate KubeProxyIPVS"},
		{"--feature-gates AllBeta=perhaps", "invalid value of AllBeta"},
		{"--feature-gates AllBeta", "malformed pair"},
		{"--feature-gates AllBeta=false --logging-format json", "logging.format: Forbidden: Log format json is disabled, see LoggingBetaOptions feature"},
		{"--vmodule x", "does not have the pattern=N format"},
		{"--vmodule x=5 --logging-format json", "logging.vmodule: Forbidden: Only supported for text log format"},
		{"--logging-format xml", "logging.format"},
		{"--log-flush-frequency 0", "logging.flushFrequency"},
		{"--log-json-split-stream", "logging.options.json.splitStream: Forbidden: Feature LoggingAlphaOptions is disabled"},
		{"--v=-1", "invalid argument"},
		{"--config " + dir + "/none", "no such file"},
		{"file logging: {format: json, vmodule: [{filePattern: x, verbosity: 3}]}", "logging.vmodule"},
		{"file logging: {format: json, options: {json: {infoBufferSize: 1Ki}}}", "logging.options.json.infoBufferSize"},
		{"file featureGates: {AllowServiceExternalIP: false}", "unrecognized feature gate \"AllowServiceExternalIP\""},
		{"file featureGates: {ProxyTerminatingEndpoints: false}", "ProxyTerminatingEndpoints=false is not supported"},
		{"file mode: kernelspace", "mode: Invalid value: \"kernelspace\""},
		{"file conntrack: {maxPerCore: many}", "conntrack"},
		{"file mode: [", "yaml"},
		{"raw apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration", "v1alpha2"},
		{"raw apiVersion: v1\nkind: Service", "Service"},
		{"raw ", "Kind"},
	} {
		args := strings.Split(tt.args, " ")
		if text, ok := strings.CutPrefix(tt.args, "file "); ok {
			args = []string{"--config", write(t, dir, header+text+"\n")}
		} else if text, ok := strings.CutPrefix(tt.args, "raw "); ok {
			args = []string{"--config", write(t, dir, text)}
		}
		if _, err := parse(args...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want %q in it", tt.args, err, tt.want)
		}
	}
	if _, err := NewFlags("run").config(nil, func() (string, error) { return "", errors.New("no name") }); err == nil || !strings.Contains(err.Error(), "no name") {
		t.Errorf("no host name: %v", err)
	}
}

func write(t *testing.T, dir, text string) string {
	t.Helper()
	path := filepath.Join(dir, "config.yaml")
	must.Do(t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// TestKubeadmFilesAreRead reads files as kubeadm puts them into the ConfigMap kube-proxy.
func TestKubeadmFilesAreRead(t *testing.T) {
	c := of(t, "--config", "testdata/kubeadm.yaml", "--hostname-override", "node-9")
	// All other values must be the flags' defaults.
	want := of(t, "--hostname-override", "node-9", "--kubeconfig", "/var/lib/kube-proxy/kubeconfig.conf", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/56")
	want.Effective.TypeMeta = c.Effective.TypeMeta
	if !reflect.DeepEqual(c.Effective, want.Effective) {
		t.Errorf("%+v\nwant\n%+v", c.Effective, want.Effective)
	}
	wantNotes(t, c, "the configuration file names no mode: mode nftables is used, where kube-proxy's default is iptables, "+
		"and NodePorts answer only at the node's primary addresses, not at its other addresses or at localhost")

	c = of(t, "--config", "testdata/kubeadm-old-ipvs.yaml", "--proxy-mode", "iptables", "-v", "4")
	e := c.Effective
	if c.Mode != "ipvs" || c.NodeName != "worker-7" || !c.MasqueradeAll || c.MasqueradeMark != 1<<13 || c.SyncPeriod != 20*time.Second || e.IPVS.MinSyncPeriod.Duration != 0 ||
		e.IPVS.Scheduler != "wrr" || !e.IPVS.StrictARP || len(e.IPVS.ExcludeCIDRs) != 1 || e.HealthzBindAddress != "[::]:10256" ||
		e.MetricsBindAddress != "[::]:10249" || *e.Conntrack.MaxPerCore != 0 || e.Conntrack.TCPEstablishedTimeout.Duration != 2*time.Hour || e.Logging.Verbosity != 4 {
		t.Errorf("%+v\n%+v", c, e)
	}
	unknown := func(field string) string {
		return fmt.Sprintf("in the configuration file: unknown field %q: ignored", field)
	}
	wantNotes(t, c, unknown("resourceContainer"), unknown("udpIdleTimeout"), unknown("conntrack.max"),
		"--proxy-mode is ignored, since --config is given", "feature gates that are fixed here: SupportIPVSProxyMode=true")
}

// wantNotes checks that a configuration's notes are exactly these, in any order.
func wantNotes(t *testing.T, c *Config, want ...string) {
	t.Helper()
	got := slices.Sorted(slices.Values(c.Notes))
	if slices.Sort(want); !slices.Equal(got, want) {
		t.Errorf("notes\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestDrainLimitIsForIPVSAndAChangeFromIt(t *testing.T) {
	for _, mode := range []string{"ipvs", "nftables"} {
		c := of(t, "--proxy-mode="+mode, "--ipvs-drain-limit=90s")
		if c.DrainLimit != 90*time.Second {
			t.Errorf("limit %v", c.DrainLimit)
		}
		wantNotes(t, c)
	}
}

const header = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// ofFile returns the configuration of a file with these fields.
func ofFile(t *testing.T, text string, args ...string) *Config {
	t.Helper()
	return of(t, append([]string{"--config", write(t, t.TempDir(), header+text)}, args...)...)
}

// TestEmptyNodePortAddressesEqualMissing compares an empty list with a missing one.
func TestEmptyNodePortAddressesEqualMissing(t *testing.T) {
	for _, mode := range []string{ModeNFTables, ModeIPTables, ModeIPVS} {
		missing := of(t, "--proxy-mode", mode)
		if missing.PrimaryOnly != (mode == ModeNFTables) {
			t.Errorf("mode %s: only at primary addresses: %v", mode, missing.PrimaryOnly)
		}
		for what, c := range map[string]*Config{
			"flag":      of(t, "--proxy-mode", mode, "--nodeport-addresses="),
			"file":      ofFile(t, "mode: "+mode+"\nnodePortAddresses: []\n"),
			"file null": ofFile(t, "mode: "+mode+"\nnodePortAddresses: null\n"),
			"file none": ofFile(t, "mode: "+mode+"\n"),
		} {
			if c.PrimaryOnly != missing.PrimaryOnly || !reflect.DeepEqual(c.NodePorts, missing.NodePorts) {
				t.Errorf("mode %s, %s: NodePorts at %+v, want %+v", mode, what, c.NodePorts, missing.NodePorts)
			}
		}
	}
}

// TestDefaultModeIsNoted is called under both names, with and without a mode.
func TestDefaultModeIsNoted(t *testing.T) {
	for _, asKubeProxy := range []bool{false, true} {
		for _, args := range [][]string{nil, {"--proxy-mode", "nftables"}} {
			fl := addFlags(pflag.NewFlagSet("run", pflag.ContinueOnError), "linux")
			fl.AsKubeProxy = asKubeProxy
			must.Do(t, fl.Parse(append([]string{"--hostname-override", "n1"}, args...)))
			c := must.Get(fl.Config())(t)
			noted := slices.ContainsFunc(c.Notes, func(n string) bool {
				return strings.HasPrefix(n, "--proxy-mode is not given: mode nftables is used, where kube-proxy's default is iptables")
			})
			if noted != (asKubeProxy && args == nil) {
				t.Errorf("as kube-proxy %t, %q: notes %q", asKubeProxy, args, c.Notes)
			}
		}
	}
}

// TestServersListenAsKubeProxyDocuments checks the addresses of the servers.
func TestServersListenAsKubeProxyDocuments(t *testing.T) {
	const ignored = " has no effect unless it is 0 or "
	for _, tt := range []struct {
		args, healthz, metrics string
		notes                  []string
	}{
		{"", "0.0.0.0:10256", "127.0.0.1:10249", nil},
		{"--bind-address 192.0.2.1", "0.0.0.0:10256", "127.0.0.1:10249", nil},
		{"--bind-address 2001:db8::1", "[::]:10256", "127.0.0.1:10249", nil},
		{"--healthz-bind-address 192.0.2.1 --metrics-bind-address ::", "192.0.2.1:10256", "[::]:10249", nil},
		{"--healthz-bind-address 192.0.2.1:1 --metrics-bind-address [::]:2", "192.0.2.1:1", "[::]:2", nil},
		{"--healthz-bind-address= --metrics-bind-address=", "", "", nil},
		{"--healthz-port 0 --metrics-port 0", "", "", nil},
		{"--healthz-port 0 --healthz-bind-address 192.0.2.1:1", "", "127.0.0.1:10249", nil},
		{"--healthz-port 5 --healthz-bind-address 192.0.2.1", "192.0.2.1:5", "127.0.0.1:10249", nil},
		{"--metrics-port 5 --metrics-bind-address ::1", "0.0.0.0:10256", "[::1]:5", nil},
		// The port of an address takes precedence over the deprecated flag, and the default
		// address has one.
		{
			"--healthz-port 5 --healthz-bind-address 192.0.2.1:1", "192.0.2.1:1", "127.0.0.1:10249",
			[]string{"--healthz-port" + ignored + "--healthz-bind-address is an address without a port"},
		},
		{
			"--metrics-port 5", "0.0.0.0:10256", "127.0.0.1:10249",
			[]string{"--metrics-port" + ignored + "--metrics-bind-address is an address without a port"},
		},
		{"--healthz-port 5 --healthz-bind-address=", "", "127.0.0.1:10249", nil},
	} {
		c := of(t, strings.Fields(tt.args)...)
		if e := c.Effective; e.HealthzBindAddress != tt.healthz || e.MetricsBindAddress != tt.metrics {
			t.Errorf("%s: %q and %q, want %q and %q", tt.args, e.HealthzBindAddress, e.MetricsBindAddress, tt.healthz, tt.metrics)
		}
		wantNotes(t, c, tt.notes...)
	}
	e := ofFile(t, "bindAddress: '::'\nhealthzBindAddress: 192.0.2.1\nmode: nftables\n").Effective
	if e.HealthzBindAddress != "192.0.2.1:10256" || e.MetricsBindAddress != "[::1]:10249" {
		t.Errorf("file: %q and %q", e.HealthzBindAddress, e.MetricsBindAddress)
	}
}

// TestGatesAreHonoredFixedOrNoted sets gates of each kind.
func TestGatesAreHonoredFixedOrNoted(t *testing.T) {
	for _, tt := range []struct {
		gates string
		on    map[featuregate.Feature]bool
		notes []string
	}{
		{"AllowServiceExternalIPs=false,KubeProxyIPVS=false", map[featuregate.Feature]bool{AllowServiceExternalIPs: false, KubeProxyIPVS: false}, nil},
		{"AllowServiceExternalIPs=true", map[featuregate.Feature]bool{AllowServiceExternalIPs: true}, nil},
		{"ContextualLogging=false,LoggingAlphaOptions=true", map[featuregate.Feature]bool{logsapi.ContextualLogging: false, logsapi.LoggingAlphaOptions: true}, nil},
		{"AllBeta=false,ComponentFlagz=true", map[featuregate.Feature]bool{zpages.ComponentFlagz: true, zpages.ComponentStatusz: false, AllowServiceExternalIPs: true}, nil},
		{
			"AllAlpha=true",
			map[featuregate.Feature]bool{logsapi.LoggingAlphaOptions: true, LocalhostNodePorts: true}, nil,
		},
		{
			"GracefulNodeShutdown=false, EndpointSliceTerminatingCondition=true,WinDSR=true,NFTablesNetlink=false",
			map[featuregate.Feature]bool{AllowServiceExternalIPs: true},
			[]string{"feature gates that have no effect here: EndpointSliceTerminatingCondition, GracefulNodeShutdown, NFTablesNetlink, WinDSR"},
		},
		{
			"IPv6DualStack=true,KubeProxyNFTablesLocalhostNodePorts=false",
			map[featuregate.Feature]bool{LocalhostNodePorts: false},
			[]string{"feature gates that are fixed here: IPv6DualStack=true"},
		},
	} {
		file := "mode: nftables\nfeatureGates:\n"
		for gate := range strings.SplitSeq(tt.gates, ",") {
			file += "  " + strings.Replace(strings.TrimSpace(gate), "=", ": ", 1) + "\n"
		}
		for what, c := range map[string]*Config{"flag": of(t, "--feature-gates", tt.gates), "file": ofFile(t, file)} {
			for gate, on := range tt.on {
				if got := c.Gates.Enabled(gate); got != on {
					t.Errorf("%s %s: %s is %v", what, tt.gates, gate, got)
				}
			}
			wantNotes(t, c, tt.notes...)
		}
	}
	wantNotes(t, of(t, "--proxy-mode", "iptables", "--feature-gates", "KubeProxyNFTablesLocalhostNodePorts=true,AllAlpha=true"))
}

// TestGateListIsSorted checks the form of the list, so that a diff of an update is easy to read.
func TestGateListIsSorted(t *testing.T) {
	var names []string
	for line := range strings.Lines(gateNames) {
		if !strings.HasPrefix(line, "#") {
			names = append(names, strings.TrimSuffix(line, "\n"))
		}
	}
	if !slices.IsSorted(names) || len(slices.Compact(slices.Clone(names))) != len(names) || len(names) < 400 {
		t.Errorf("%d names, sorted %v", len(names), slices.IsSorted(names))
	}
	for _, name := range names {
		if !regexp.MustCompile(`^[A-Z][A-Za-z0-9]*$`).MatchString(name) {
			t.Errorf("%q is not the name of a feature gate", name)
		}
	}
	if _, minor, _ := strings.Cut(Kubernetes, "."); !strings.Contains(gateNames[:strings.Index(gateNames, "\nA")], "v1."+minor+".") {
		t.Errorf("the list is not from Kubernetes %s", Kubernetes)
	}
}

// TestUnusedSectionsAreNotedOnly has invalid values in the sections of other modes. They are
// not validated, but each field is noted.
func TestUnusedSectionsAreNotedOnly(t *testing.T) {
	sections := map[string]string{
		ModeNFTables: "nftables: {masqueradeBit: 99, syncPeriod: -1s}\n",
		ModeIPTables: "iptables: {syncPeriod: 1s, minSyncPeriod: 1h}\n",
		ModeIPVS:     "ipvs: {syncPeriod: -1s, tcpTimeout: -1s, excludeCIDRs: [x]}\n",
	}
	fields := map[string][]string{
		ModeNFTables: {"nftables.masqueradeBit", "nftables.syncPeriod"},
		ModeIPTables: {"iptables.syncPeriod", "iptables.minSyncPeriod"},
		ModeIPVS:     {"ipvs.syncPeriod", "ipvs.tcpTimeout", "ipvs.excludeCIDRs"},
	}
	for mode := range sections {
		file := "mode: " + mode + "\ndetectLocalMode: NodeCIDR\nclusterCIDR: x\n"
		want := []string{"in the configuration file: clusterCIDR has no effect with detectLocalMode NodeCIDR"}
		for other, section := range sections {
			if _, err := parse("--config", write(t, t.TempDir(), header+"mode: "+other+"\n"+section)); err == nil {
				t.Errorf("mode %s accepts %s", other, section)
			}
			if other == mode {
				continue
			}
			file += section
			for _, field := range fields[other] {
				want = append(want, "in the configuration file: "+field+" has no effect in mode "+mode)
			}
		}
		wantNotes(t, ofFile(t, file), want...)
	}
}

// TestFieldsForWindowsAreOneNote reads a file that nodes with Windows use too. kube-proxy on
// Linux accepts it.
func TestFieldsForWindowsAreOneNote(t *testing.T) {
	wantNotes(t, ofFile(t, "mode: nftables\nwindowsRunAsService: true\nwinkernel: {enableDSR: true, networkName: x, sourceVip: \"\"}\n"),
		"in the configuration file: fields for Windows have no effect: winkernel.networkName, winkernel.enableDSR, windowsRunAsService")
	wantNotes(t, ofFile(t, "mode: nftables\nwindowsRunAsService: false\nwinkernel: {enableDSR: false, networkName: \"\"}\n"))
}

// everything sets every supported field except the mode, to a value that differs from a
// missing field.
const everything = `featureGates: {AllowServiceExternalIPs: true}
clientConnection: {kubeconfig: k, acceptContentTypes: a, contentType: c, qps: 1, burst: 1}
logging: {format: text, flushFrequency: 1s, verbosity: 1, vmodule: [{filePattern: x, verbosity: 1}],
  options: {text: {infoBufferSize: 0, splitStream: false}, json: {infoBufferSize: 0}}}
hostnameOverride: node
bindAddress: 192.0.2.1
healthzBindAddress: 192.0.2.1:1
metricsBindAddress: 192.0.2.1:2
bindAddressHardFail: true
enableProfiling: true
showHiddenMetricsForVersion: "1.35"
iptables: {masqueradeBit: 14, masqueradeAll: true, localhostNodePorts: true, syncPeriod: 30s, minSyncPeriod: 1s}
ipvs: {syncPeriod: 30s, minSyncPeriod: 1s, scheduler: rr, excludeCIDRs: [10.0.0.0/8], strictARP: true, tcpTimeout: 1s, tcpFinTimeout: 1s, udpTimeout: 1s}
nftables: {masqueradeBit: 14, masqueradeAll: true, syncPeriod: 30s, minSyncPeriod: 1s}
detectLocalMode: BridgeInterface
detectLocal: {bridgeInterface: b, interfaceNamePrefix: i}
clusterCIDR: 10.0.0.0/8
nodePortAddresses: [10.0.0.0/8]
oomScoreAdj: 1
conntrack: {maxPerCore: 0, min: 1, tcpEstablishedTimeout: 1s, tcpCloseWaitTimeout: 1s, tcpBeLiberal: true, udpTimeout: 1s, udpStreamTimeout: 1s}
configSyncPeriod: 15m
portRange: 1-2
`

// TestFieldsWithoutEffectAreNoted checks that each field that is set and has no effect is noted
// once, in every mode.
func TestFieldsWithoutEffectAreNoted(t *testing.T) {
	always := []string{
		"detectLocal.interfaceNamePrefix has no effect with detectLocalMode BridgeInterface",
		"clusterCIDR has no effect with detectLocalMode BridgeInterface",
		"conntrack.min has no effect with conntrack.maxPerCore 0",
		"configSyncPeriod has no effect: the API server reports every change",
		"portRange has no effect, as in kube-proxy",
		"showHiddenMetricsForVersion has no effect: no metric is hidden",
	}
	sections := map[string][]string{
		"iptables":       {"masqueradeBit", "masqueradeAll"},
		"iptables alone": {"localhostNodePorts", "syncPeriod", "minSyncPeriod"},
		"ipvs":           {"syncPeriod", "minSyncPeriod", "scheduler", "excludeCIDRs", "strictARP", "tcpTimeout", "tcpFinTimeout", "udpTimeout"},
		"nftables":       {"masqueradeBit", "masqueradeAll", "syncPeriod", "minSyncPeriod"},
	}
	for mode, unused := range map[string][]string{
		ModeNFTables: {"iptables", "iptables alone", "ipvs"},
		ModeIPTables: {"ipvs", "nftables"},
		ModeIPVS:     {"iptables alone", "nftables"},
	} {
		var want []string
		for _, note := range always {
			want = append(want, "in the configuration file: "+note)
		}
		for _, s := range unused {
			section, _, _ := strings.Cut(s, " ")
			for _, field := range sections[s] {
				want = append(want, fmt.Sprintf("in the configuration file: %s.%s has no effect in mode %s", section, field, mode))
			}
		}
		wantNotes(t, ofFile(t, "mode: "+mode+"\n"+everything), want...)
	}

	// Flags that override fields of the file, or take away their effect.
	wantNotes(t, ofFile(t, "mode: nftables\nhostnameOverride: node\nlogging: {format: text, verbosity: 1, vmodule: [{filePattern: x, verbosity: 1}]}\n"+
		"nftables: {syncPeriod: 20s, minSyncPeriod: 1s}\nclientConnection: {qps: 1}\n",
		"--hostname-override=m", "-v=2", "--vmodule=y=2", "--sync-period=10s", "--manifests=x", "--log-json-split-stream=false"),
		"in the configuration file: hostnameOverride has no effect, since --hostname-override is given",
		"in the configuration file: logging.verbosity has no effect, since --v is given",
		"in the configuration file: nftables.syncPeriod has no effect, since --sync-period is given",
		"in the configuration file: clientConnection.qps has no effect, since --manifests is given",
		"--log-json-split-stream has no effect with logging.format text")

	// Flags without a file.
	wantNotes(t, of(t, "--detect-local-mode=NodeCIDR", "--cluster-cidr=x", "--pod-bridge-interface=b", "--conntrack-max-per-core=0", "--conntrack-min=1",
		"--metrics-bind-address=", "--profiling", "--config-sync-period=1m", "--proxy-port-range=1", "--ipvs-scheduler=rr", "--iptables-masquerade-bit=3"),
		"--cluster-cidr has no effect with detectLocalMode NodeCIDR",
		"--pod-bridge-interface has no effect with detectLocalMode NodeCIDR",
		"--conntrack-min has no effect with conntrack.maxPerCore 0",
		"--profiling has no effect without metricsBindAddress",
		"--config-sync-period has no effect: the API server reports every change",
		"--proxy-port-range has no effect, as in kube-proxy",
		"--ipvs-scheduler has no effect in mode nftables",
		"--iptables-masquerade-bit has no effect in mode nftables")
}

// TestListsHaveEveryField checks that the lists of fields and flags are complete.
func TestListsHaveEveryField(t *testing.T) {
	// everything must set every field.
	files := must.Get(newCodec())(t)
	c, notes, err := files.decode([]byte(header + "mode: nftables\n" + everything))
	if err != nil || len(notes) != 0 {
		t.Fatalf("error %v, notes %q", err, notes)
	}
	set := setFields(c)
	var all []string
	for _, field := range fieldsOf("", reflect.TypeFor[v1alpha1.KubeProxyConfiguration]()) {
		windows := strings.HasPrefix(field, "winkernel.") || field == "windowsRunAsService"
		// These are 0 or false unless an alpha feature gate is on.
		alpha := strings.HasPrefix(field, "logging.options.")
		if !windows && !alpha {
			all = append(all, field)
		}
	}
	slices.Sort(set)
	slices.Sort(all)
	if !slices.Equal(set, all) {
		t.Errorf("set fields\n%q\nall fields\n%q", set, all)
	}

	fl := NewFlags("run")
	several := []string{"masquerade-all", "healthz-port", "metrics-port", "sync-period", "min-sync-period"}
	none := []string{
		"config", "write-config-to", "manifests", "master", "cleanup", "init-only", "adopt-from-kube-proxy", "kube-proxy-table",
		"nftables-offload", "service-traffic-metrics", "allow-annotations", "budget", "socket-lb", "socket-lb-cgroup", "socket-lb-node-only", resetFlag, "remove-startup-taint", "log-every-sync", readyzFlag, flavorFlag, drainFlag,
	}
	fields := fieldsOf("", reflect.TypeFor[v1alpha1.KubeProxyConfiguration]())
	fl.VisitAll(func(f *pflag.Flag) {
		field, one := fl.fields[f.Name]
		if others := slices.Contains(several, f.Name) || slices.Contains(none, f.Name); one == others {
			t.Errorf("--%s stands for the field %q: %v, for several or none: %v", f.Name, field, one, others)
		}
		if one && !slices.Contains(fields, field) {
			t.Errorf("--%s stands for %s, which is not a field", f.Name, field)
		}
		if strings.HasPrefix(field, "logging.") != (loggingFlags()[f.Name] != "") {
			t.Errorf("--%s is a logging flag: %v", f.Name, loggingFlags()[f.Name] != "")
		}
	})
}

// TestSocketLBFlagsWorkWithAFile gives flags that the file has no fields for.
func TestSocketLBFlagsWorkWithAFile(t *testing.T) {
	c := ofFile(t, "mode: iptables\n", "--socket-lb", "--socket-lb-cgroup=/c", "--socket-lb-node-only")
	if (c.SocketLB != SocketLB{Enabled: true, Cgroup: "/c", NodeOnly: true}) {
		t.Errorf("socket-lb is %+v", c.SocketLB)
	}
	wantNotes(t, c)
}

func TestOffloadPatternsAreChecked(t *testing.T) {
	c := of(t, "--nftables-offload", "eth0,veth*")
	if !slices.Equal(c.Offload, []string{"eth0", "veth*"}) {
		t.Errorf("patterns are %q", c.Offload)
	}
	c = ofFile(t, "mode: iptables\n", "--nftables-offload=eth0")
	wantNotes(t, c, "--nftables-offload has no effect in mode iptables")
}

func TestFlavorIsForModesWithIPTables(t *testing.T) {
	for _, mode := range []string{"iptables", "ipvs"} {
		for name, want := range map[string]iptables.Flavor{"auto": iptables.AnyFlavor, "nft": iptables.NFT, "legacy": iptables.Legacy} {
			if c := ofFile(t, "mode: "+mode+"\n", "--iptables-flavor", name); c.Flavor != want {
				t.Errorf("mode %s: --iptables-flavor %s is %q", mode, name, c.Flavor)
			}
		}
	}
	of(t, "--iptables-flavor=auto")
}

// fieldsOf returns the paths of all fields of a type, as setFields does.
func fieldsOf(path string, typ reflect.Type) (out []string) {
	switch {
	case typ == reflect.TypeFor[metav1.TypeMeta]():
		return nil
	case typ.Kind() != reflect.Struct, typ == reflect.TypeFor[metav1.Duration](),
		typ == reflect.TypeFor[logsapi.TimeOrMetaDuration](), typ == reflect.TypeFor[resource.QuantityValue]():
		return []string{path}
	}
	for f := range typ.Fields() {
		at := path
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" {
			at = strings.TrimPrefix(path+"."+name, ".")
		}
		out = append(out, fieldsOf(at, f.Type)...)
	}
	return out
}

// TestChartKnowsTheFields compares the fields of a configuration that the chart's schema allows with those that there are.
func TestChartKnowsTheFields(t *testing.T) {
	text := must.Get(os.ReadFile(filepath.Join(root, "examples/nodeproxy/deploy/chart/values.schema.json")))(t)
	var schema struct {
		Properties struct {
			Config struct{ PropertyNames struct{ Enum []string } }
		}
	}
	must.Do(t, json.Unmarshal(text, &schema))
	var want []string
	for _, f := range fieldsOf("", reflect.TypeFor[v1alpha1.KubeProxyConfiguration]()) {
		name, _, _ := strings.Cut(f, ".")
		want = append(want, name)
	}
	slices.Sort(want)
	want = slices.Compact(want)
	if got := schema.Properties.Config.PropertyNames.Enum; !slices.Equal(got, want) {
		t.Errorf("the schema has\n%q, the configuration\n%q", got, want)
	}
}

// TestLoggingFlagsOverrideTheFile checks that each logging flag overrides only its own field.
func TestLoggingFlagsOverrideTheFile(t *testing.T) {
	const file = "mode: nftables\nfeatureGates: {LoggingAlphaOptions: true}\n" +
		"logging: {format: text, verbosity: 3, flushFrequency: 7s, vmodule: [{filePattern: x, verbosity: 1}], options: {text: {splitStream: true, infoBufferSize: 1Ki}}}\n"
	l := ofFile(t, file).Effective.Logging
	if l.Verbosity != 3 || l.FlushFrequency.Duration.Duration != 7*time.Second || len(l.VModule) != 1 ||
		!l.Options.Text.SplitStream || l.Options.Text.InfoBufferSize.Value() != 1024 {
		t.Errorf("file: %+v", l)
	}
	l = ofFile(t, file, "--vmodule=y=2", "--log-text-split-stream=false", "--log-flush-frequency=8s").Effective.Logging
	if l.Verbosity != 3 || l.FlushFrequency.Duration.Duration != 8*time.Second || l.Options.Text.SplitStream ||
		!reflect.DeepEqual(l.VModule, logsapi.VModuleConfiguration{{FilePattern: "y", Verbosity: 2}, {FilePattern: "x", Verbosity: 1}}) {
		t.Errorf("file and flags: %+v", l)
	}
	l = of(t, "--feature-gates=LoggingAlphaOptions=true", "--logging-format=json", "-v=5", "--log-json-split-stream", "--log-json-info-buffer-size=2Ki").Effective.Logging
	if l.Format != "json" || l.Verbosity != 5 || !l.Options.JSON.SplitStream || l.Options.JSON.InfoBufferSize.Value() != 2048 {
		t.Errorf("flags: %+v", l)
	}
}

// TestSplitStreamOfAFileNeedsItsGate reads files that kube-proxy accepts, though it refuses the flags.
func TestSplitStreamOfAFileNeedsItsGate(t *testing.T) {
	for _, format := range []string{"text", "json"} {
		file := "mode: nftables\nlogging: {format: " + format + ", options: {" + format + ": {splitStream: true}}}\n"
		c := ofFile(t, file)
		if o := c.Effective.Logging.Options; o.Text.SplitStream || o.JSON.SplitStream {
			t.Errorf("%s: %+v", format, o)
		}
		wantNotes(t, c, "logging.options."+format+".splitStream has no effect without the feature gate LoggingAlphaOptions")
		c = ofFile(t, "featureGates: {LoggingAlphaOptions: true}\n"+file)
		if o := c.Effective.Logging.Options; o.Text.SplitStream != (format == "text") || o.JSON.SplitStream != (format == "json") {
			t.Errorf("%s with the gate: %+v", format, o)
		}
		wantNotes(t, c)
	}
}

// TestMissingModeIsNoted checks the note about the default mode.
func TestMissingModeIsNoted(t *testing.T) {
	const mode = ": mode nftables is used, where kube-proxy's default is iptables, and NodePorts answer "
	wantNotes(t, ofFile(t, "mode: ''\nnodePortAddresses: [10.0.0.0/8]\n"),
		"the configuration file names no mode"+mode+"at the addresses in nodePortAddresses, and at localhost only if these contain it")
	wantNotes(t, of(t, "--proxy-mode="), "--proxy-mode is empty"+mode+"only at the node's primary addresses, not at its other addresses or at localhost")
}

// TestWrittenConfigIsReadBack writes the effective configuration and reads it again.
func TestWrittenConfigIsReadBack(t *testing.T) {
	for _, args := range [][]string{
		{},
		{"--config", "testdata/kubeadm.yaml"},
		{"--config", "testdata/kubeadm-old-ipvs.yaml"},
		{
			"--proxy-mode", "iptables", "--nodeport-addresses", "10.0.0.0/8,localhost", "--detect-local-mode", "NodeCIDR", "--logging-format", "json",
			"--feature-gates", "NFTablesProxyMode=true", "--healthz-bind-address", "192.0.2.1:80", "--profiling", "-v", "3",
		},
	} {
		first := of(t, args...)
		path := filepath.Join(t.TempDir(), "written.yaml")
		must.Do(t, first.Write(path))
		text := must.Get(os.ReadFile(path))(t)
		second := of(t, "--config", path)
		for _, note := range second.Notes {
			if !strings.HasPrefix(note, "feature gate") && !strings.Contains(note, " has no effect") {
				t.Errorf("%q: note %q", args, note)
			}
		}
		again, err := Encode(second.Effective)
		if err != nil || string(again) != string(text) {
			t.Errorf("%q: error %v, wrote\n%s\nand read\n%s", args, err, text, again)
		}
	}
	if err := of(t).Write("/nonexistent/x"); err == nil {
		t.Error("no error for a folder that does not exist")
	}
}

// FuzzDecode checks that no file makes the agent panic, and that every accepted file survives
// a round trip.
func FuzzDecode(f *testing.F) {
	// Short seeds: the fuzzer minimizes interesting inputs byte by byte.
	for _, text := range []string{
		"", "mode: ipvs\nipvs: {scheduler: mh, tcpTimeout: 1m, excludeCIDRs: [10.0.0.0/8]}\n", "bindAddress: '::'\nnodePortAddresses: [primary]\n",
		"conntrack: {maxPerCore: 0, min: null, udpTimeout: 5s}\noomScoreAdj: -1\n", "featureGates: {AllAlpha: true}\nlogging: {format: json}\n",
		"clusterCIDR: 10.0.0.0/8\ndetectLocalMode: NodeCIDR\nmode: [\n", "mode: a\nmode: b\nnone: 1\n",
	} {
		f.Add([]byte(header + text))
	}
	files, err := newCodec()
	if err != nil {
		f.Fatal(err)
	}
	fuzzseed.Add(f)
	f.Fuzz(func(t *testing.T, text []byte) {
		c, _, err := files.decode(text)
		if err != nil {
			return
		}
		setDefaults(c, "linux")
		gates, _, err := setGates(c.FeatureGates, string(c.Mode))
		if err != nil || validate(c, "linux", gates) != nil {
			return
		}
		again := must.Get(files.encode(c))(t)
		if _, notes, err := files.decode(again); err != nil || len(notes) != 0 {
			t.Fatalf("%s: error %v, notes %q", again, err, notes)
		}
	})
}

// ofWindows returns the configuration of a command line on Windows.
func ofWindows(t *testing.T, file string, args ...string) (*Config, error) {
	t.Helper()
	fl := addFlags(pflag.NewFlagSet("run", pflag.ContinueOnError), "windows")
	fl.Network = os.Getenv("KUBE_NETWORK")
	if err := fl.Parse(args); err != nil {
		return nil, err
	}
	return fl.config(func(string) ([]byte, error) {
		return []byte(header + file), nil
	}, func() (string, error) { return "host", nil })
}

// TestWindowsHasItsOwnModeAndFlags checks the defaults, the flags and the file of Windows.
func TestWindowsHasItsOwnModeAndFlags(t *testing.T) {
	c, err := ofWindows(t, "", "--network-name=cluster", "--source-vip=10.0.0.2", "--enable-dsr", "--forward-healthcheck-vip", "--log-file=x")
	if err != nil {
		t.Fatal(err)
	}
	w := c.Effective.Winkernel
	if c.Mode != ModeKernelspace || w.NetworkName != "cluster" || w.SourceVip != "10.0.0.2" || !w.EnableDSR ||
		!w.ForwardHealthCheckVip || w.RootHnsEndpointName != "cbr0" || c.LogFile != "x" {
		t.Errorf("flags: mode %s, %+v, log file %q", c.Mode, w, c.LogFile)
	}
	wantNotes(t, c)
	c = must.Get(ofWindows(t, "winkernel: {networkName: net, enableDSR: true}\nwindowsRunAsService: true\niptables: {masqueradeAll: true}\n", "--config=f", "--enable-dsr=false"))(t)
	if c.Mode != ModeKernelspace || c.Effective.Winkernel.NetworkName != "net" || !c.Effective.Winkernel.EnableDSR {
		t.Errorf("file: mode %s, %+v", c.Mode, c.Effective.Winkernel)
	}
	wantNotes(t, c, "--enable-dsr is ignored, since --config is given", "in the configuration file: iptables.masqueradeAll has no effect in mode kernelspace")
	t.Setenv("KUBE_NETWORK", "env")
	if c, err = ofWindows(t, ""); err != nil || c.Effective.Winkernel.NetworkName != "env" {
		t.Errorf("KUBE_NETWORK: %+v, %v", c, err)
	}
	for args, want := range map[string]string{
		"--proxy-mode=nftables":        "must be kernelspace",
		"--source-vip=x":               "winkernel.sourceVip",
		"--feature-gates=WinDSR=false": "WinDSR=false is not supported",
		"--socket-lb":                  "--socket-lb is not supported",
		"--forward-healthcheck-vip --root-hnsendpoint-name=": "winkernel.rootHnsEndpointName",
	} {
		if _, err := ofWindows(t, "", strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
	if _, err := parse("--network-name=cluster"); err == nil {
		t.Error("Linux has the flag --network-name")
	}
}
