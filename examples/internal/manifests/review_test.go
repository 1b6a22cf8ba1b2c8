package manifests_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/manifests"
	"github.com/go-proxier/proxier/internal/testing/must"
)

// reviews are specs of objects, and what the Reader must say about them.
var reviews = []struct {
	name, spec string
	want       string // "" for nothing
}{
	{"plain", "Service | {name: web} | {clusterIP: 10.96.7.1, ports: [{port: 80}]}", ""},
	{"dual stack", "Service | {name: web} | {clusterIP: 10.96.7.1, clusterIPs: [10.96.7.1], ipFamilies: [IPv4], ports: [{port: 80}]}", ""},
	{"name that begins with a digit", "Service | {name: 7web} | {clusterIP: 10.96.7.1, ports: [{port: 80}]}", ""},
	{"headless", "Service | {name: web} | {clusterIP: None, selector: {a: b}}", ""},
	{"ExternalName", "Service | {name: web} | {type: ExternalName, externalName: example.com}", ""},
	{"node port", "Service | {name: web} | {clusterIP: 10.96.7.1, type: NodePort, ports: [{port: 80, nodePort: 30080}]}", ""},

	{"no clusterIP", "Service | {name: web} | {ports: [{port: 80}]}", "would set what it lacks: clusterIP"},
	{"no nodePort", "Service | {name: web} | {clusterIP: 10.96.7.1, type: NodePort, ports: [{name: http, port: 80}]}", `would set what it lacks: port "http": nodePort`},
	{"no healthCheckNodePort", "Service | {name: web} | {clusterIP: 10.96.7.1, type: LoadBalancer, externalTrafficPolicy: Local, ports: [{port: 80, nodePort: 30080}]}", "would set what it lacks: healthCheckNodePort"},
	{"type", "Service | {name: web} | {clusterIP: 10.96.7.1, type: nodePort, ports: [{port: 80}]}", `would refuse it: type "nodePort" is unknown`},
	{"protocol", "Service | {name: web} | {clusterIP: 10.96.7.1, ports: [{port: 80, protocol: tcp}]}", `would refuse it: port "": protocol "tcp" is unknown`},
	{"port", "Service | {name: web} | {clusterIP: 10.96.7.1, ports: [{name: http, port: 80000}]}", `would refuse it: port "http": port 80000 is out of range`},
	{"port name", "Service | {name: web} | {clusterIP: 10.96.7.1, ports: [{name: '%d HTTP', port: 80}]}", `would refuse it: port "%d HTTP": its name is no DNS label`},
	{"two unnamed ports", "Service | {name: web} | {clusterIP: 10.96.7.1, ports: [{port: 80}, {port: 81}]}", `would refuse it: port "": its name or number is that of another port, or it has no name`},
	{"the same port twice", "Service | {name: web} | {clusterIP: 10.96.7.1, ports: [{name: a, port: 80}, {name: b, port: 80}]}", `would refuse it: port "b": its name or number is that of another port`},
	{"no ports", "Service | {name: web} | {clusterIP: 10.96.7.1}", "would refuse it: it has no ports"},
	{"nodePort of a ClusterIP", "Service | {name: web} | {clusterIP: 10.96.7.1, type: ClusterIP, ports: [{port: 80, nodePort: 30080}]}", `would refuse it: port "": a Service of type "ClusterIP" has no nodePort`},
	{"nodePort out of range", "Service | {name: web} | {clusterIP: 10.96.7.1, type: NodePort, ports: [{port: 80, nodePort: 70000}]}", `would refuse it: port "": nodePort 70000 is out of range`},
	{"name", "Service | {name: Web_1} | {clusterIP: 10.96.7.1, ports: [{port: 80}]}", `would refuse it: name "Web_1" is no DNS label`},
	{"clusterIP", "Service | {name: web} | {clusterIP: 10.96.7.300, ports: [{port: 80}]}", `would refuse it: clusterIP "10.96.7.300" is no address of a Service`},
	{"clusterIPs alone", "Service | {name: web} | {clusterIPs: [10.96.7.1], ports: [{port: 80}]}", "would refuse it: it has clusterIPs and no clusterIP"},
	{"another first clusterIP", "Service | {name: web} | {clusterIP: 10.96.7.1, clusterIPs: [10.96.7.2], ports: [{port: 80}]}", `would refuse it: clusterIP "10.96.7.1" is not the first of the clusterIPs`},
	{"headless LoadBalancer", "Service | {name: web} | {clusterIP: None, type: LoadBalancer, ports: [{port: 80, nodePort: 30080}]}", "would refuse it: a Service of type LoadBalancer has a clusterIP other than None"},
	{"externalIP", "Service | {name: web} | {clusterIP: 10.96.7.1, externalIPs: [127.0.0.1], ports: [{port: 80}]}", "would refuse it: externalIP 127.0.0.1 is not that of a host in the network"},
	{"source range", "Service | {name: web} | {clusterIP: 10.96.7.1, type: LoadBalancer, loadBalancerSourceRanges: [10.0.0.0], ports: [{port: 80, nodePort: 30080}]}", `would refuse it: loadBalancerSourceRange "10.0.0.0" is no range of addresses`},
	{"affinity", "Service | {name: web} | {clusterIP: 10.96.7.1, sessionAffinity: clientIP, ports: [{port: 80}]}", `would refuse it: sessionAffinity "clientIP" is unknown`},
	{"affinity timeout", "Service | {name: web} | {clusterIP: 10.96.7.1, sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 100000}}, ports: [{port: 80}]}", "would refuse it: timeoutSeconds 100000 is not between 1 and 86400"},
	{"internal policy", "Service | {name: web} | {clusterIP: 10.96.7.1, internalTrafficPolicy: local, ports: [{port: 80}]}", `would refuse it: internalTrafficPolicy "local" is unknown`},
	{"external policy", "Service | {name: web} | {clusterIP: 10.96.7.1, type: NodePort, externalTrafficPolicy: local, ports: [{port: 80, nodePort: 30080}]}", `would refuse it: externalTrafficPolicy "local" is unknown`},
	{"several", "Service | {name: web} | {type: nodePort, internalTrafficPolicy: x, sessionAffinity: other, ports: [{port: 0, protocol: z}, {port: 0, protocol: z}]}",
		`would refuse it: type "nodePort" is unknown; sessionAffinity "other" is unknown; internalTrafficPolicy "x" is unknown; port "": protocol "z" is unknown (and 5 more); an API server would set what it lacks: clusterIP`},

	{"slice", "EndpointSlice | {name: web-1, labels: {kubernetes.io/service-name: web}} | {addressType: IPv4, ports: [{port: 80}], endpoints: [{addresses: [10.1.0.2]}]}", ""},
	{"no label", "EndpointSlice | {name: web-1} | {addressType: IPv4}", "it belongs to no Service, because it has no label kubernetes.io/service-name"},
	{"no addressType", "EndpointSlice | {name: web-1, labels: {kubernetes.io/service-name: web}} | {endpoints: [{addresses: [10.1.0.2]}]}", `would refuse it: addressType "" is unknown`},
	{"address", "EndpointSlice | {name: web-1, labels: {kubernetes.io/service-name: web}} | {addressType: IPv4, endpoints: [{addresses: [10.1.0.x]}]}", `would refuse it: endpoint 0: address "10.1.0.x" is no IP address`},
	{"loopback address", "EndpointSlice | {name: web-1, labels: {kubernetes.io/service-name: web}} | {addressType: IPv4, endpoints: [{addresses: [127.0.0.1]}]}", "would refuse it: endpoint 0: address 127.0.0.1 is not that of a host in the network"},
	{"address of the other family", "EndpointSlice | {name: web-1, labels: {kubernetes.io/service-name: web}} | {addressType: IPv6, endpoints: [{addresses: [10.1.0.2]}]}", "would refuse it: endpoint 0: address 10.1.0.2 is not of type IPv6"},
	{"no address", "EndpointSlice | {name: web-1, labels: {kubernetes.io/service-name: web}} | {addressType: IPv4, endpoints: [{addresses: []}]}", "would refuse it: endpoint 0: it has no address"},
	{"protocol of a slice", "EndpointSlice | {name: web-1, labels: {kubernetes.io/service-name: web}} | {addressType: IPv4, ports: [{name: a, port: 80, protocol: udp}]}", `would refuse it: port "a": protocol "udp" is unknown`},
	{"ports with one name", "EndpointSlice | {name: web-1, labels: {kubernetes.io/service-name: web}} | {addressType: IPv4, ports: [{name: a, port: 1}, {name: a, port: 2}]}", `would refuse it: port "a": its name is that of another port`},
	{"name of a slice", "EndpointSlice | {name: WEB, labels: {kubernetes.io/service-name: web}} | {addressType: IPv4}", `would refuse it: name "WEB" is no name in the DNS`},
	{"cidr", "ServiceCIDR | {name: extra} | {cidrs: [10.97.0.0]}", `would refuse it: cidr "10.97.0.0" is no range of addresses`},
}

// readReview returns what the Reader says about a spec of reviews.
func readReview(t *testing.T, spec string) manifests.Changes {
	t.Helper()
	f := strings.Split(spec, " | ")
	api := map[string]string{"Service": "v1", "EndpointSlice": "discovery.k8s.io/v1", "ServiceCIDR": "networking.k8s.io/v1"}[f[0]]
	text := "{apiVersion: " + api + ", kind: " + f[0] + ", metadata: " + f[1]
	if f[0] == "EndpointSlice" { // its fields have no spec around them
		text += ", " + strings.TrimPrefix(f[2], "{")
	} else {
		text += ", spec: " + f[2] + "}"
	}
	path := filepath.Join(t.TempDir(), "f.yaml")
	must.Do(t, os.WriteFile(path, []byte(text), 0o600))
	c, err := manifests.NewReader(path).Read()
	if err != nil || len(c.Problems) != 0 || len(c.Set) != 1 || len(c.Reviews) > 1 {
		t.Fatalf("%s: %v, problems %v, %d objects, reviews %v", text, err, c.Problems, len(c.Set), c.Reviews)
	}
	return c
}

// TestObjectsThatAnAPIServerWouldChangeAreNamed reads each object of reviews.
func TestObjectsThatAnAPIServerWouldChangeAreNamed(t *testing.T) {
	for _, r := range reviews {
		c := readReview(t, r.spec)
		switch {
		case r.want == "" && len(c.Reviews) != 0:
			t.Errorf("%s: %v", r.name, c.Reviews[0])
		case r.want != "" && (len(c.Reviews) != 1 || !strings.Contains(c.Reviews[0].Error(), r.want) || c.Reviews[0].Ref != c.Set[0].Ref || c.Reviews[0].Line != 1):
			t.Errorf("%s: %v, want %q", r.name, c.Reviews, r.want)
		}
	}
}
