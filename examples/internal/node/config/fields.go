package config

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// setFields returns the paths, such as "nftables.masqueradeBit", of the fields of a
// decoded file whose values differ from those of absent fields. Null, 0, false and ""
// do not differ: kubeadm writes them for every field. The paths are in the order of
// the Go types.
func setFields(c *v1alpha1.KubeProxyConfiguration) []string {
	return appendSet(nil, "", reflect.ValueOf(c).Elem())
}

func appendSet(out []string, path string, v reflect.Value) []string {
	switch x := v.Interface().(type) {
	case metav1.TypeMeta:
		return out
	case metav1.Duration: // a struct, but one value
		return appendUnless(x.Duration == 0, out, path)
	case logsapi.TimeOrMetaDuration:
		return appendUnless(x.Duration.Duration == 0, out, path)
	case resource.QuantityValue:
		return appendUnless(x.Value() == 0, out, path)
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
			at := path
			if name != "" { // the fields of an embedded struct are the outer one's
				at = strings.TrimPrefix(path+"."+name, ".")
			}
			out = appendSet(out, at, v.Field(i))
		}
		return out
	case reflect.Slice, reflect.Map:
		return appendUnless(v.Len() == 0, out, path)
	}
	return appendUnless(v.IsZero(), out, path)
}

func appendUnless(absent bool, out []string, path string) []string {
	if absent {
		return out
	}
	return append(out, path)
}

// fieldAt returns the field at a path of setFields.
func fieldAt(c *v1alpha1.KubeProxyConfiguration, path string) reflect.Value {
	v := reflect.ValueOf(c).Elem()
	for name := range strings.SplitSeq(path, ".") {
		v = v.FieldByNameFunc(func(field string) bool { return strings.EqualFold(field, name) })
	}
	return v
}

// rule reports whether a field, every field of a section, or a flag without a field, has an effect.
type rule struct {
	field  string
	effect bool
	// why is the reason, which follows "has no effect" in the log.
	why string
}

// rules returns the rules for a configuration with its defaults, and with the flags
// that were given. Fields without a rule always have an effect or are rejected.
func (fl *Flags) rules(c *v1alpha1.KubeProxyConfiguration, given map[string]bool) []rule {
	in := func(modes ...string) bool { return slices.Contains(modes, string(c.Mode)) }
	inMode := " in mode " + string(c.Mode)
	detect := func(mode string) bool { return string(c.DetectLocalMode) == mode }
	detectWith := " with detectLocalMode " + string(c.DetectLocalMode)
	format := func(f string) bool { return c.Logging.Format == f }
	formatWith := " with logging.format " + c.Logging.Format
	out := []rule{
		{"iptables.masqueradeBit", in(ModeIPTables, ModeIPVS), inMode},
		{"iptables.masqueradeAll", in(ModeIPTables, ModeIPVS), inMode},
		{"iptables.localhostNodePorts", in(ModeIPTables), inMode},
		{"iptables.syncPeriod", in(ModeIPTables, ModeUserspace, ModeKernelspace), inMode},
		{"iptables.minSyncPeriod", in(ModeIPTables, ModeUserspace, ModeKernelspace), inMode},
		{"ipvs", in(ModeIPVS), inMode},
		{"nftables", in(ModeNFTables), inMode},
		{"detectLocal.bridgeInterface", detect(BridgeInterface), detectWith},
		{"detectLocal.interfaceNamePrefix", detect(InterfaceNamePrefix), detectWith},
		{"detectLocal", !in(ModeUserspace, ModeKernelspace), inMode},
		{"conntrack", !in(ModeUserspace, ModeKernelspace), inMode},
		// The Host Networking Service recognizes pods by their endpoints, and its node ports answer
		// at all addresses.
		{"detectLocalMode", !in(ModeKernelspace), inMode},
		{"nodePortAddresses", !in(ModeKernelspace), inMode},
		{"oomScoreAdj", !in(ModeKernelspace), inMode},
		{"clusterCIDR", detect(ClusterCIDR), detectWith},
		{"clusterCIDR", !in(ModeKernelspace), inMode},
		{"clientConnection", fl.out.Manifests == "", ", since --manifests is given"},
		{"conntrack.min", *c.Conntrack.MaxPerCore != 0, " with conntrack.maxPerCore 0"},
		{"bindAddressHardFail", c.HealthzBindAddress != "" || c.MetricsBindAddress != "", ": there is no server"},
		{"enableProfiling", c.MetricsBindAddress != "", " without metricsBindAddress"},
		{"logging.options.text", format("text"), formatWith},
		{"logging.options.text.infoBufferSize", c.Logging.Options.Text.SplitStream, " without logging.options.text.splitStream"},
		{"logging.options.json", format("json"), formatWith},
		{"logging.options.json.infoBufferSize", c.Logging.Options.JSON.SplitStream, " without logging.options.json.splitStream"},
		{"configSyncPeriod", false, ": the API server reports every change"},
		{"portRange", false, ", as in kube-proxy"},
		{"showHiddenMetricsForVersion", false, ": no metric is hidden"},
		{"--master", fl.out.Manifests == "", ", since --manifests is given"},
		{"--remove-startup-taint", fl.out.Manifests == "", ", since --manifests is given"},
		{"--masquerade-all", !in(ModeUserspace), " in mode userspace: endpoints always see an address of the node"},
		{"--nftables-offload", in(ModeNFTables), inMode},
		{"--" + resetFlag, in(ModeNFTables, ModeIPTables), inMode},
	}
	for _, mode := range []string{ModeNFTables, ModeIPTables, ModeIPVS} {
		out = append(out, overridden(mode+".syncPeriod", "sync-period", given), overridden(mode+".minSyncPeriod", "min-sync-period", given))
	}
	return out
}

// overridden returns the rule for a field that has no effect if a flag is given.
func overridden(field, flag string, given map[string]bool) rule {
	return rule{field, !given[flag], ", since --" + flag + " is given"}
}

// noteNoEffect adds a note for each field of the file, and each flag, that was set
// and has no effect. The fields for Windows share one note: a file is often used by nodes of
// both systems.
func (fl *Flags) noteNoEffect(c *v1alpha1.KubeProxyConfiguration, fileFields []string, given map[string]bool) {
	rules := fl.rules(c, given)
	for _, flag := range slices.Sorted(maps.Keys(given)) {
		if fl.ignored(flag) {
			continue
		}
		if why, none := noEffect(rules, cmp.Or(fl.fields[flag], "--"+flag)); none {
			fl.note("--%s has no effect%s", flag, why)
		}
	}
	// A file's vmodule is added to that of the flag, so it keeps its effect.
	for _, flag := range append(slices.Sorted(maps.Keys(loggingFlags())), "hostname-override") {
		if flag != "vmodule" {
			rules = append(rules, overridden(fl.fields[flag], flag, given))
		}
	}
	var windows []string
	for _, field := range fileFields {
		if why, none := noEffect(rules, field); none {
			fl.note("in the configuration file: %s has no effect%s", field, why)
		}
		if c.Mode != ModeKernelspace && (field == "windowsRunAsService" || strings.HasPrefix(field, "winkernel.")) {
			windows = append(windows, field)
		}
	}
	if len(windows) != 0 {
		fl.note("in the configuration file: fields for Windows have no effect: %s", strings.Join(windows, ", "))
	}
}

// noEffect returns why a field has no effect, and whether it has none.
func noEffect(rules []rule, field string) (why string, none bool) {
	for _, r := range rules {
		if !r.effect && (r.field == field || strings.HasPrefix(field, r.field+".")) {
			return r.why, true
		}
	}
	return "", false
}
