// Package conformance tests that a [ruleset.Backend] handles packets as Kubernetes
// specifies, in the manner of testing/fstest. A vendor's test of a backend is this, in
// a package whose other tests can run in a network namespace:
//
//	func TestMain(m *testing.M) { conformance.Main(m) }
//
//	func TestConformance(t *testing.T) {
//		conformance.Run(t, conformance.Options{
//			New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
//				b, err := mybackend.New(env.NetNS)
//				if err != nil {
//					tb.Fatal(err)
//				}
//				tb.Cleanup(b.Close)
//				return b
//			},
//			Skip: map[conformance.Feature]string{
//				conformance.SCTP: "the data plane forwards TCP and UDP only",
//			},
//		})
//	}
//
// [Run] tests the backend in a series of worlds. A world is a small cluster around one
// node: local pods, the pods of another node, and external clients, each in a real
// network namespace. It needs no privilege except that of making user namespaces. The
// world sets Services and EndpointSlices in a real [tracker.Tracker], a real
// [ruleset.Engine] and [ruleset.Cursor] drive the backend, and then every kind of host
// connects to every address. The world compares each connection with
// [ruleset.Snapshot.Trace]: which endpoints may respond (each of them must in turn),
// whether they see the client's address or the node's, and whether a connection is
// refused or gets no reply.
//
// Each world is a sub-test and tests both address families. It ends with its first
// failed step. Worlds run in parallel, each with its own backend and namespaces. They
// mostly wait, so a high -parallel makes the suite faster.
//
// New and every Apply are called on a thread in the node's namespace ([Env.NetNS]): a
// program started there, or a socket opened there, belongs to the node. [Env.Do] enters
// the namespace at other times. The backend may program anything in this namespace. The
// node is the router of all other hosts.
//
// [Options].Skip declares what a data plane does not support, by [Feature]. Worlds about
// these features are skipped with the given reason. All worlds are skipped if namespaces
// cannot be made.
//
// Use [NewWorld] for further tests of a backend. [World.Churn] opens connections
// continuously while a function runs, and reports each one that failed.
//
// # Without packets
//
// [Simulate] needs neither privileges nor Linux and takes seconds. It runs the backend
// in the same worlds and in random ones. Instead of making connections it calls a
// function of the caller, [Fake].Handle, which looks a packet up in what the backend
// wrote: a map in memory that replaces the tables of the kernel or the switch. Writes
// fail, processes restart, frontends move between Services, and Simulate also checks the
// state between any two writes:
//
//	func TestSimulation(t *testing.T) {
//		conformance.Simulate(t, conformance.Simulation{
//			New: func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
//				tables := newFakeTables(env.Fail, env.Look)
//				return conformance.Fake{
//					Backend: func() ruleset.Backend { return mybackend.New(tables) },
//					Handle:  tables.handle,
//				}
//			},
//		})
//	}
//
// This shows that the backend writes the right entries in the right order. Run shows that
// the data plane handles packets correctly with them.
//
// # Worlds as text
//
// Most worlds are text, in the folder worlds of this package. [Options].Scripts and
// [Simulation].Scripts add those of a vendor's folder, such as os.DirFS("testdata/worlds"):
// the files *.txt, each with any number of worlds. # begins a comment.
//
//	world our load balancer
//	needs source ranges
//	set web cluster=1 type=LoadBalancer ports=80:30080 lb=1 externalPolicy=Local endpoints=pod1,remote1
//	  client1 -> lb1:80 node:30080 = pod1
//	  pod3 -> TCP lb1:80 = pod1 remote1
//	change web sources=192.0.2.99/32,2001:db8:1::99/128
//	  everyone -> lb1:80 = drop
//	check if other ports: everyone -> lb1:81 = pass
//
// A step is one line. The indented lines below it are rows, which are checked after a sync: hosts, targets,
// and what happens to a connection from each host to each target. The result is reject, drop, pass, or
// all pods that may be reached, with :PORT unless it is 8080, and with * if the pod sees an address of the
// node in place of the client's. Trace determines what the backend must do, and must agree with the row.
//
// Hosts are client1 to client4, node, loopback (the node with a loopback address), pod1 to pod3, remote1
// to remote3, and everyone: client1 remote3 pod1 pod3 node. A target is ADDRESS:PORT. Addresses are
// cluster1, external1, lb1 and pod1, each with any number up to 199, and node, node2, gateway and loopback.
// Connections use TCP and UDP, and both families. TCP, UDP, SCTP, IPv4 or IPv6 restricts the targets behind
// it.
//
// A world begins with its name, the features without which it is skipped, and its settings:
//
//	world NAME
//	needs FEATURE, FEATURE
//	with clients=N remotePods=N masqueradeAll=yes nodePortAddresses=CIDR,primary,localhost
//	with local=none|clusterCIDR|bridge|prefix  how the node recognizes its pods, by their CIDR if not set
//	with bound=ADDRESS,ADDRESS                 further addresses of the node
//	with elsewhere=TARGET,TARGET               targets that the remote node serves
//
// Steps:
//
//	set NAME KEY=VALUE ...            set a Service and its endpoints; cluster is required
//	change NAME KEY=VALUE ...         change a part of them
//	remove NAME
//	node zone=ZONE, node address=ADDRESS
//	serviceCIDRs none
//	check ROW                         check a row
//	check TARGETS                     check the rows below; the targets are for rows without ->
//	check if FEATURE, FEATURE: ...    only sync if the backend lacks a feature
//	sync, resync                      sync; make the next delta full
//	stop, start                       end the agent's process; start a new one
//	restart                           both, unless the backend lacks the feature restart
//	remember TCP TARGET               store the endpoint that each client reaches
//	same TCP TARGET = WHY             fail if a client reaches another one than remembered
//	hold TARGETS                      open connections
//	held WHY                          fail if one of them does not work any more
//	undisturbed TARGETS               fail if a connection fails during the indented steps
//
// Parts of a Service, of which lists may be none:
//
//	cluster=N                         the number of its cluster IP
//	type=NodePort|LoadBalancer|ExternalName|ClusterIP
//	ports=[NAME@]PORT[-LAST][:NODEPORT][>TARGET][/PROTOCOL],...
//	external=N,ADDRESS lb=N lbMode=VIP|Proxy
//	created=SECONDS affinity=SECONDS hash=none|source|source-and-port
//	sources=CIDR,CIDR                 _ stands for a space
//	internalPolicy=Local|Cluster externalPolicy=Local|Cluster
//	preferLocal=yes|no pass=yes|no    annotations of the suite: PreferLocal, PassWithoutEndpoints
//	endpoints=POD[/unready][/serving][/terminating][/weight=N][/zones=A+B][/nodes=A+B],...
//	endpointsIn=IPv4|IPv6             the other family has no endpoints
//
// A port without a protocol stands for two, named tcp and udp, and a Service without ports has port 80 of
// both. Ports lead to port 8080 of the pods, which serve 8080 and 8081.
//
// On systems other than Linux the package has only the parts that Simulate needs.
package conformance
