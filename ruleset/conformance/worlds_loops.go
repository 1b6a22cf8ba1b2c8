package conformance

import (
	"fmt"
	"regexp"
	"strings"
)

// loopWorlds returns worlds whose scripts repeat the same with other numbers.
func loopWorlds() []world {
	return []world{
		{name: "everything together", needs: []Feature{Affinity, SourceRanges}, config: config{clients: affinityClients}, run: together},

		{name: "keys that differ in the protocol", run: func(w cluster) { coexist(w, "TCP", 80, "UDP", 80) }},
		{name: "keys that differ in the port", run: func(w cluster) { coexist(w, "TCP", 80, "TCP", 81) }},

		{name: "frontends move between services", run: func(w cluster) {
			// hold sets the Services so that each has the external IP and the NodePort of the given
			// number, or none for 0.
			hold := func(numbers ...int) {
				rows := ""
				for i, n := range numbers {
					ports := "80/TCP external=none"
					if n != 0 {
						ports = fmt.Sprintf("80:3008%d/TCP external=1%[1]d", n)
						rows += fmt.Sprintf("\n  everyone -> TCP external1%d:80 node:3008%[1]d = pod%d*", n, i+1)
					}
					runScript(w, fmt.Sprintf("set %c cluster=%d type=NodePort endpoints=pod%[2]d ports=%s", 'a'+i, i+1, ports))
					rows += fmt.Sprintf("\n  client1 -> TCP cluster%d:80 = pod%[1]d*", i+1)
				}
				runScript(w, "check"+rows)
			}
			hold(1, 0, 0)
			hold(0, 1, 0) // from one Service to another
			hold(1, 2, 0)
			hold(2, 1, 0) // two Services exchange theirs
			hold(2, 1, 3)
			hold(1, 3, 2) // in a circle
			hold(0, 1, 3) // a chain
			// The owner is deleted, and the other Service gets the frontends.
			runScript(w, `
				remove a
				change c external=11
				  client1 -> TCP external11:80 = pod2*
				remove b
				  client1 -> TCP external11:80 = pod3*`)
		}},

		{name: "many ports", run: func(w cluster) {
			const n = 20
			var ports, rows []string
			for i := range n {
				pods := "pod1 remote1"
				if i%2 == 1 {
					pods = "pod1:8081 remote1:8081"
				}
				ports = append(ports, fmt.Sprintf("p%d@%d>%d/TCP", i, 1000+i, podPort+i%2))
				rows = append(rows, fmt.Sprintf("\n  pod3 -> TCP cluster1:%d = %s", 1000+i, pods))
			}
			runScript(w, "set web cluster=1 endpoints=pod1,remote1 ports="+strings.Join(ports, ","))
			runScript(w, "check"+strings.Join(rows, ""))
			runScript(w, "change web ports="+strings.Join(ports[:n/2], ","))
			runScript(w, "check"+strings.Join(rows[:n/2], ""))
		}},

		{name: "numbers of endpoints", config: config{remotePods: manyPods}, run: func(w cluster) {
			for _, n := range []int{1, 2, 3, 8, 9, 16, 17, 18, manyPods, 19, 15, 4, 1} {
				pods := remotes(n)
				runScript(w, "set web cluster=1 endpoints="+strings.Join(pods, ","))
				runScript(w, "check pod3 -> UDP cluster1:80 = "+strings.Join(pods, " "))
			}
		}},
	}
}

// coexist checks two ports of a Service that have one part of their keys in common: together, each
// alone, and again together. The second target of each pod tells the ports apart.
func coexist(w cluster, protocol string, port int, protocol2 string, port2 int) {
	rows := func(protocol string, port int, suffix string) string {
		pods := fmt.Sprintf("pod1%s* remote1%[1]s*", suffix)
		return fmt.Sprintf(`
			  client1 node -> %s cluster1:%d = %s
			  client1 pod3 -> %[1]s node:300%[2]d = %[3]s
			  client1 -> %[1]s external1:%[2]d = %[3]s`, protocol, port, pods)
	}
	a, b := fmt.Sprintf("a@%d:300%[1]d/%s", port, protocol), fmt.Sprintf("b@%d:300%[1]d>8081/%s", port2, protocol2)
	first, second := rows(protocol, port, ""), rows(protocol2, port2, ":8081")
	const set = "set web cluster=1 type=NodePort external=1 endpoints=pod1,remote1 ports="
	runScript(w, set+a+","+b+first+second)
	for _, alone := range []string{a + first, b + second} {
		runScript(w, "change web ports="+alone)
		runScript(w, "change web ports="+a+","+b+first+second)
	}
	// Only the first port has endpoints.
	runScript(w, "change web ports="+a)
	runScript(w, "set other cluster=2 type=NodePort ports="+b+first+fmt.Sprintf("\n  client1 pod3 -> %s node:300%d = reject", protocol2, port2))
}

// wants holds the expected results at the frontends of a Service, by client.
type wants struct {
	outside, nearby string // externally, for clients and for a local pod
	node            string // … and for the node
	cluster         string // by the cluster IP, for a client
	inside          string // … and for a local pod
}

// podName matches the name of a pod.
var podName = regexp.MustCompile(`\w+\d`)

// masqueraded marks every pod as seeing the node's address.
func masqueraded(pods string) string { return podName.ReplaceAllString(pods, "$0*") }

// togetherRows returns the rows for every frontend of the two ports of Service web, one group per kind
// of frontend: a client that connects to several at the same time may get two affinities.
func togetherRows(restricted bool, x wants) (groups [4]string) {
	for i, proto := range []string{"TCP", "UDP"} {
		add := func(group int, from, to string, port int, want string) {
			if i == 1 {
				want = podName.ReplaceAllString(want, "$0:8081")
			}
			groups[group] += fmt.Sprintf("\n  %s -> %s %s:%d = %s", from, proto, to, port+i, want)
		}
		for g, port := range []int{30080, 80} {
			to := []string{"node", "external1"}[g]
			add(g, "client1 client2", to, port, x.outside)
			add(g, "pod3", to, port, x.nearby)
			add(g, "node", to, port, x.node)
		}
		add(2, "client1", "lb1", 80, x.outside)
		add(2, "pod3", "lb1", 80, x.nearby)
		if restricted {
			add(2, "client2 pod1 node", "lb1", 80, "drop")
		} else {
			add(2, "client2", "lb1", 80, x.outside)
			add(2, "node", "lb1", 80, x.node)
		}
		add(3, "client1 node", "cluster1", 80, x.cluster)
		add(3, "pod3", "cluster1", 80, x.inside)
	}
	return groups
}

// together is a world about a Service with many features together. Each feature must work together
// with the others, and must be removable.
func together(w cluster) {
	// They allow client1 and pod3.
	const ranges = "192.0.2.10/32,10.244.1.13/32,2001:db8:1::a/128,fd00:10:244:1::13/128"
	runScript(w, `
		set web cluster=1 type=LoadBalancer external=1 lb=1 externalPolicy=Local affinity=10800 sources=`+ranges+` ports=a@80:30080/TCP,b@81:30081>8081/UDP endpoints=pod1,pod2,remote1,remote2
		set bystander cluster=2 type=LoadBalancer lb=2 externalPolicy=Local affinity=10800 sources=`+ranges+` ports=80:30090 endpoints=pod2,remote2`)
	// The other Service must not be affected by changes of this one.
	bystander := [4]string{
		"\n  pod3 -> node:30090 = pod2 remote2",
		"",
		"\n  client1 -> lb2:80 = pod2\n  client2 -> lb2:80 = drop",
		"\n  client2 -> cluster2:80 = pod2* remote2*",
	}
	check := func(restricted bool, x wants) {
		groups := togetherRows(restricted, x)
		if x.cluster == "reject" { // there is no affinity
			runScript(w, "check"+strings.Join(groups[:], ""))
			return
		}
		for g, rows := range groups {
			runScript(w, "check"+rows+bystander[g])
		}
	}
	change := func(words string) { runScript(w, "change web "+words) }
	const all, local, far, mixed = "pod1 pod2 remote1 remote2", "pod1 pod2", "remote1 remote2", "pod2 remote3"
	first := wants{outside: local, nearby: all, node: masqueraded(all), cluster: masqueraded(all), inside: all}
	check(true, first)

	// Changes of another Service, and changes that do not affect endpoints, move no client.
	runScript(w, `
		remember TCP node:30080
		change bystander affinity=600
		same TCP node:30080 = though only another service changed
		change web sources=192.0.2.10/32,10.244.1.13/32,2001:db8:1::a/128
		same TCP node:30080 = though only source ranges changed
		resync
		same TCP node:30080 = by a full resync`)
	change("sources=" + ranges)
	check(true, first)

	// The endpoints move to other nodes, and one moves back.
	change("endpoints=remote1,remote2")
	check(true, wants{outside: "drop", nearby: far, node: masqueraded(far), cluster: masqueraded(far), inside: far})
	change("endpoints=pod2,remote3")
	check(true, wants{outside: "pod2", nearby: mixed, node: masqueraded(mixed), cluster: masqueraded(mixed), inside: mixed})

	// The policies and the endpoints change together.
	change("externalPolicy=Cluster")
	star := masqueraded(mixed)
	check(true, wants{outside: star, nearby: star, node: star, cluster: star, inside: mixed})
	change("externalPolicy=Local internalPolicy=Local endpoints=pod1,pod2,remote1,remote2")
	check(true, wants{outside: local, nearby: all, node: masqueraded(all), cluster: masqueraded(local), inside: local})

	// Affinity is removed, with the policies and without them.
	change("affinity=0")
	check(true, wants{outside: local, nearby: all, node: masqueraded(all), cluster: masqueraded(local), inside: local})
	change("affinity=60 endpoints=pod2,remote3")
	check(true, wants{outside: "pod2", nearby: mixed, node: star, cluster: "pod2*", inside: "pod2"})
	change("affinity=0 externalPolicy=Cluster internalPolicy=Cluster sources=none")
	check(false, wants{outside: star, nearby: star, node: star, cluster: star, inside: mixed})

	// All endpoints are removed and added again.
	change("endpoints=none")
	check(false, wants{outside: "reject", nearby: "reject", node: "reject", cluster: "reject", inside: "reject"})
	change("affinity=10800 externalPolicy=Local endpoints=pod1,pod2,remote1,remote2 sources=" + ranges)
	check(true, first)
	runScript(w, "remove web")
	runScript(w, "check"+bystander[2]+"\n  client1 -> TCP node:30080 = pass\n  pod3 -> TCP cluster1:80 = drop")
}

// manyPods is more than any number of endpoints that data planes may handle
// specially.
const manyPods = 23

// remotes returns the names of the first n remote pods.
func remotes(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprint(remoteName, i+1))
	}
	return names
}
