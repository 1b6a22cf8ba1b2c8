package main

import (
	"strings"
	"testing"
)

func TestManifestIsAdapted(t *testing.T) {
	text, err := kustomize(nodeproxySource + "/deploy/base")
	if err != nil {
		t.Fatal(err)
	}
	got, image, err := adapt(text, "iptables", false)
	if err != nil || !strings.HasPrefix(image, "ghcr.io/go-proxier/nodeproxy:v") {
		t.Fatalf("image %q, error %v", image, err)
	}
	for _, want := range []string{"    mode: iptables\n", "value: " + controlIP + "\n", "    conntrack: {maxPerCore: 0}\n", "clusterCIDR: " + podRange + "\n", "- NET_RAW\n            drop:"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	got, _, err = adapt(text, "nftables", false)
	if err != nil || !strings.Contains(got, "    nodePortAddresses: [primary,localhost]\n") {
		t.Errorf("error %v, or no NodePorts at loopback addresses in\n%s", err, got)
	}
	if _, _, err := adapt(strings.ReplaceAll(text, "api.cluster.example", "api"), "iptables", true); err == nil {
		t.Error("a manifest without the API server's address is accepted")
	}
}
