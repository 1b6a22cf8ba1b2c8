package config

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
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

// TestDefaults compares with kube-proxy's documented defaults.
func TestDefaults(t *testing.T) {
	c := of(t)
	e := c.Effective
	for what, ok := range map[string]bool{
		"mode":             c.Mode == "nftables",
		"node":             c.NodeName == "node-a",
		"bind address":     e.BindAddress == "0.0.0.0" && !c.BindAddress.IsValid(),
		"healthz":          e.HealthzBindAddress == "0.0.0.0:10256",
		"metrics":          e.MetricsBindAddress == "127.0.0.1:10249",
		"oom":              *e.OOMScoreAdj == -999,
		"periods":          c.SyncPeriod == 30*time.Second && c.MinSyncPeriod == time.Second,
		"ipvs periods":     e.IPVS.SyncPeriod.Duration == 30*time.Second && e.IPVS.MinSyncPeriod.Duration == 0,
		"conntrack":        c.Tuning.MaxPerCore == 32768 && c.Tuning.Min == 131072 && c.Tuning.UDPTimeout == 0,
		"timeouts":         c.Tuning.TCPEstablishedTimeout == 24*time.Hour && c.Tuning.TCPCloseWaitTimeout == time.Hour,
		"masquerade":       c.MasqueradeBit == 14 && !c.MasqueradeAll,
		"NodePorts":        c.PrimaryOnly && len(e.NodePortAddresses) == 1,
		"local":            e.DetectLocalMode == "ClusterCIDR" && c.DetectLocal.CIDRs == nil,
		"localhost":        *e.IPTables.LocalhostNodePorts,
		"client":           e.ClientConnection.ContentType == "application/vnd.kubernetes.protobuf" && e.ClientConnection.QPS == 5 && e.ClientConnection.Burst == 10,
		"logging":          e.Logging.Format == "text" && c.Verbosity == 2,
		"nothing to note":  len(c.Notes) == 0,
		"configSyncPeriod": e.ConfigSyncPeriod.Duration == 15*time.Minute,
	} {
		if !ok {
			t.Errorf("%s: %+v", what, e)
		}
	}
	six := of(t, "--bind-address", "2001:db8::1").Effective
	if six.HealthzBindAddress != "[::]:10256" || six.MetricsBindAddress != "[::1]:10249" {
		t.Errorf("IPv6: %s %s", six.HealthzBindAddress, six.MetricsBindAddress)
	}
	if c := of(t, "--proxy-mode", "iptables"); c.PrimaryOnly || c.Effective.NodePortAddresses != nil {
		t.Errorf("iptables: NodePorts at %q", c.Effective.NodePortAddresses)
	}
}

func TestFlags(t *testing.T) {
	c := of(t, "--hostname-override", "B", "--proxy-mode=ipvs", "--ipvs-sync-period=7s", "--ipvs-min-sync-period", "2s", "--iptables-masquerade-bit=3",
		"--healthz-bind-address=", "--metrics-port=9", "--cluster-cidr", "10.1.2.3/16, fd00::1/48", "--masquerade-all",
		"--bind-address=192.0.2.1", "--conntrack-udp-timeout=5s", "--iptables-sync-period=9s", "--feature-gates=NFTablesProxyMode=true,AllAlpha=false")
	e := c.Effective
	if c.NodeName != "b" || c.SyncPeriod != 7*time.Second || c.MinSyncPeriod != 2*time.Second || c.MasqueradeBit != 3 || !c.MasqueradeAll ||
		e.HealthzBindAddress != "" || e.MetricsBindAddress != "127.0.0.1:9" || c.BindAddress != netip.MustParseAddr("192.0.2.1") ||
		len(c.DetectLocal.CIDRs) != 2 || c.DetectLocal.CIDRs[0].String() != "10.1.0.0/16" || c.Tuning.UDPTimeout != 5*time.Second {
		t.Errorf("%+v\n%+v", c, e)
	}
	for _, want := range []string{"--iptables-sync-period has no effect in mode ipvs", "NFTablesProxyMode is always true", "AllAlpha makes no difference"} {
		if !strings.Contains(strings.Join(c.Notes, "\n"), want) {
			t.Errorf("no note %q in %q", want, c.Notes)
		}
	}
	if len(c.Notes) != 3 {
		t.Errorf("notes: %q", c.Notes)
	}
	if c := of(t, "--manifests", "x", "--kubeconfig", "y"); len(c.Notes) != 1 || !strings.Contains(c.Notes[0], "--kubeconfig has no effect, since --manifests is given") {
		t.Errorf("notes: %q", c.Notes)
	}
	if c := of(t, "--min-sync-period=0", "--sync-period=2s"); c.MinSyncPeriod != 0 || c.SyncPeriod != 2*time.Second {
		t.Errorf("periods: %v %v", c.MinSyncPeriod, c.SyncPeriod)
	}
}

// TestRefused has each thing that is wrong, or not supported, refused by name.
func TestRefused(t *testing.T) {
	dir := t.TempDir()
	for _, tt := range []struct{ args, says string }{
		{"--proxy-mode kernelspace", "mode: Invalid value"},
		{"--proxy-mode Nftables", "must be nftables, iptables, ipvs"},
		{"--iptables-masquerade-bit 32", "iptables.masqueradeBit: Invalid value: 32"},
		{"--sync-period 0", "nftables.syncPeriod"},
		{"--min-sync-period 1m", "nftables.minSyncPeriod"},
		{"--oom-score-adj 1001", "oomScoreAdj"},
		{"--bind-address here", "bindAddress"},
		{"--healthz-bind-address 1.2.3.4:99999", "healthzBindAddress"},
		{"--metrics-bind-address :80", "metricsBindAddress"},
		{"--nodeport-addresses 10.0.0.0", "nodePortAddresses"},
		{"--cluster-cidr 10.0.0.0/8,10.1.0.0/16", "clusterCIDR: Invalid value: \"10.0.0.0/8,10.1.0.0/16\": more than one IPv4 CIDR"},
		{"--cluster-cidr fd00::/200", "clusterCIDR"},
		{"--detect-local-mode Guess", "detectLocalMode: Invalid value: \"Guess\""},
		{"--detect-local-mode BridgeInterface", "detectLocal.bridgeInterface"},
		{"--detect-local-mode InterfaceNamePrefix", "detectLocal.interfaceNamePrefix"},
		{"--conntrack-min=-1", "conntrack.min"},
		{"--conntrack-udp-timeout=-1s", "conntrack.udpTimeout"},
		{"--ipvs-exclude-cidrs x", "ipvs.excludeCIDRs[0]"},
		{"--ipvs-tcp-timeout=-1s", "ipvs.tcpTimeout"},
		{"--kube-api-burst=-1", "clientConnection.burst"},
		{"--hostname-override \u00a0", "--hostname-override is empty"},
		{"--feature-gates Flying=true", "feature gate Flying is not known"},
		{"--feature-gates ProxyTerminatingEndpoints=false", "ProxyTerminatingEndpoints=false is not supported"},
		{"--feature-gates KubeProxyNFTablesLocalhostNodePorts=true", "KubeProxyNFTablesLocalhostNodePorts=true is not supported"},
		{"--feature-gates AllBeta=perhaps", "neither true nor false"},
		{"--vmodule x=5", "--vmodule is not supported"},
		{"--logging-format xml", "logging.format"},
		{"--config " + dir + "/none", "no such file"},
		{"file winkernel: {networkName: x}", "winkernel: Unsupported value: \"given\": this is not Windows"},
		{"file windowsRunAsService: true", "windowsRunAsService"},
		{"file logging: {vmodule: [{filePattern: x, verbosity: 3}]}", "logging.vmodule"},
		{"file logging: {format: json, options: {json: {splitStream: true}}}", "logging.options"},
		{"file mode: userspace", "mode: Invalid value: \"userspace\""},
		{"file conntrack: {maxPerCore: many}", "conntrack"},
		{"file mode: [", "yaml"},
		{"raw apiVersion: kubeproxy.config.k8s.io/v1alpha2\nkind: KubeProxyConfiguration", "v1alpha2"},
		{"raw apiVersion: v1\nkind: Service", "Service"},
		{"raw ", "Kind"},
	} {
		args := strings.Split(tt.args, " ")
		if text, ok := strings.CutPrefix(tt.args, "file "); ok {
			args = []string{"--config", write(t, dir, "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"+text+"\n")}
		} else if text, ok := strings.CutPrefix(tt.args, "raw "); ok {
			args = []string{"--config", write(t, dir, text)}
		}
		if _, err := parse(args...); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: error %v, want %q in it", tt.args, err, tt.says)
		}
	}
	if _, err := NewFlags("run").config(nil, func() (string, error) { return "", errors.New("no name") }); err == nil || !strings.Contains(err.Error(), "no name") {
		t.Errorf("no host name: %v", err)
	}
}

func write(t *testing.T, dir, text string) string {
	t.Helper()
	path := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestKubeadm reads files as kubeadm puts them into the ConfigMap kube-proxy.
func TestKubeadm(t *testing.T) {
	c := of(t, "--config", "testdata/kubeadm.yaml", "--hostname-override", "node-9")
	// But for what the file says, it is what flags without a value come to.
	want := of(t, "--hostname-override", "node-9", "--kubeconfig", "/var/lib/kube-proxy/kubeconfig.conf", "--cluster-cidr", "10.244.0.0/16,fd00:10:244::/56")
	want.Effective.TypeMeta = c.Effective.TypeMeta
	want.Effective.Logging.FlushFrequency = c.Effective.Logging.FlushFrequency
	want.Effective.Logging.Options = c.Effective.Logging.Options
	if !reflect.DeepEqual(c.Effective, want.Effective) {
		t.Errorf("%+v\nwant\n%+v", c.Effective, want.Effective)
	}
	if len(c.Notes) != 1 || !strings.Contains(c.Notes[0], "names no mode") {
		t.Errorf("notes: %q", c.Notes)
	}

	c = of(t, "--config", "testdata/kubeadm-old-ipvs.yaml", "--proxy-mode", "iptables", "-v", "4")
	e := c.Effective
	if c.Mode != "ipvs" || c.NodeName != "worker-7" || !c.MasqueradeAll || c.MasqueradeBit != 13 || c.SyncPeriod != 20*time.Second || c.MinSyncPeriod != 0 ||
		e.IPVS.Scheduler != "wrr" || !e.IPVS.StrictARP || len(e.IPVS.ExcludeCIDRs) != 1 || e.HealthzBindAddress != "[::]:10256" ||
		e.MetricsBindAddress != "[::]:10249" || c.Tuning.MaxPerCore != 0 || c.Tuning.TCPEstablishedTimeout != 2*time.Hour || c.Verbosity != 4 {
		t.Errorf("%+v\n%+v", c, e)
	}
	notes := strings.Join(c.Notes, "\n")
	for _, want := range []string{`unknown field "resourceContainer": ignored`, `unknown field "udpIdleTimeout"`, `unknown field "conntrack.max"`,
		"--proxy-mode is ignored, since --config is given", "SupportIPVSProxyMode is always true"} {
		if !strings.Contains(notes, want) {
			t.Errorf("no note %q in\n%s", want, notes)
		}
	}
	if strings.Contains(notes, "--v ") || len(c.Notes) != 5 {
		t.Errorf("notes:\n%s", notes)
	}
}

// TestRoundTrip writes what is in effect and reads it again.
func TestRoundTrip(t *testing.T) {
	for _, args := range [][]string{
		{},
		{"--config", "testdata/kubeadm.yaml"},
		{"--config", "testdata/kubeadm-old-ipvs.yaml"},
		{"--proxy-mode", "iptables", "--nodeport-addresses", "10.0.0.0/8,localhost", "--detect-local-mode", "NodeCIDR", "--logging-format", "json",
			"--feature-gates", "NFTablesProxyMode=true", "--healthz-bind-address", "192.0.2.1:80", "--profiling", "-v", "3"},
	} {
		first := of(t, args...)
		path := filepath.Join(t.TempDir(), "written.yaml")
		if err := first.Write(path); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		second := of(t, "--config", path)
		for _, note := range second.Notes {
			if !strings.HasPrefix(note, "feature gate") {
				t.Errorf("%q: note %q", args, note)
			}
		}
		again, err := encode(second.Effective)
		if err != nil || string(again) != string(text) {
			t.Errorf("%q: error %v, from\n%s\ncomes\n%s", args, err, text, again)
		}
		if first.Verbosity != second.Verbosity {
			t.Errorf("%q: verbosity %d, want %d", args, second.Verbosity, first.Verbosity)
		}
	}
	if err := of(t).Write("/nonexistent/x"); err == nil {
		t.Error("written to a folder that is not there")
	}
}

// FuzzDecode has no file make the agent panic, and every one that is accepted
// survive a round trip.
func FuzzDecode(f *testing.F) {
	// Short ones: what the fuzzer finds interesting it makes smaller, a byte at a time.
	for _, text := range []string{
		"", "mode: ipvs\nipvs: {scheduler: mh, tcpTimeout: 1m, excludeCIDRs: [10.0.0.0/8]}\n", "bindAddress: '::'\nnodePortAddresses: [primary]\n",
		"conntrack: {maxPerCore: 0, min: null, udpTimeout: 5s}\noomScoreAdj: -1\n", "featureGates: {AllAlpha: true}\nlogging: {format: json}\n",
		"clusterCIDR: 10.0.0.0/8\ndetectLocalMode: NodeCIDR\nmode: [\n", "mode: a\nmode: b\nnone: 1\n",
	} {
		f.Add([]byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n" + text))
	}
	files, err := newCodec()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, _, err := files.decode(text)
		if err != nil {
			return
		}
		setDefaults(c)
		if validate(c) != nil {
			return
		}
		again, err := files.encode(c)
		if err != nil {
			t.Fatal(err)
		}
		if _, notes, err := files.decode(again); err != nil || len(notes) != 0 {
			t.Fatalf("%s: error %v, notes %q", again, err, notes)
		}
	})
}
