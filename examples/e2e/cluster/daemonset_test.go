package main

import (
	"path/filepath"
	"strings"
	"testing"
)

const deploy = "../../nodeproxy/deploy"

func TestManifestIsAdapted(t *testing.T) {
	text, err := readBase(filepath.Join(deploy, "base"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := adapt(text, "iptables", false)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"    mode: iptables\n", "value: " + controlIP + "}", "    conntrack: {maxPerCore: 0}\n", "clusterCIDR: " + podRange + "\n", "add: [NET_ADMIN, NET_RAW]"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	got, err = adapt(text, "nftables", false)
	if err != nil || !strings.Contains(got, "    nodePortAddresses: [primary,localhost]\n") {
		t.Errorf("error %v, or no NodePorts at loopback addresses in\n%s", err, got)
	}
	if _, err := adapt(strings.ReplaceAll(text, "api.cluster.example", "api"), "iptables", true); err == nil {
		t.Error("a manifest without the API server's address is accepted")
	}
}
