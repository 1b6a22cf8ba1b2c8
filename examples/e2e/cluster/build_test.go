package main

import (
	"os"
	"regexp"
	"testing"
)

// The end-to-end test of nodeproxy and the cluster must use the same API server.
func TestVersionIsThatOfTheAPIServerModule(t *testing.T) {
	pin := regexp.MustCompile(`(?m)^\tk8s\.io/kubernetes (\S+)`)
	var versions []string
	for _, file := range []string{"go.mod", "../apiserver/go.mod"} {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		m := pin.FindSubmatch(b)
		if m == nil {
			t.Fatalf("%s does not require k8s.io/kubernetes", file)
		}
		versions = append(versions, string(m[1]))
	}
	if versions[0] != versions[1] {
		t.Errorf("this module requires Kubernetes %s, ../apiserver %s", versions[0], versions[1])
	}
}
