// Package conformance tests that a [ruleset.Backend] handles packets as Kubernetes specifies, in the manner of
// testing/fstest. A vendor's test of a backend:
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
//			Skip: map[conformance.Feature]string{conformance.SCTP: "forwards TCP and UDP only"},
//		})
//	}
//
// [Run] tests the backend in a series of worlds. A world is a small cluster around one node: local pods, the pods of
// another node, and external clients, each in a real network namespace. Run needs no privilege except that of making
// user namespaces. After changes, every kind of host connects to every address. The world compares each connection with
// [ruleset.Snapshot.Trace]: which endpoints may respond (each of them must in turn), whether they see the client's
// address, and whether a connection is refused or gets no reply. Worlds mostly wait, so a high -parallel makes the
// suite faster.
//
// New and every Apply are called on a thread in the node's namespace. [Env.Do] enters it at other times.
//
// [Options].Skip declares, by [Feature], what a data plane does not support. For further tests there is [NewWorld].
//
// # Without packets
//
// [Simulate] needs neither privileges nor Linux and takes seconds. It runs the backend in the same worlds and in
// random ones. Instead of making connections it calls [Fake].Handle, a function of the caller, which looks a packet up
// in what the backend wrote to memory. Writes fail, processes restart, frontends move between Services, and Simulate
// checks the state between any two writes. So it shows that the backend writes the right entries in the right order, and
// Run that the data plane handles packets correctly with them.
//
// # Worlds as text
//
// Every world is text, in the folder worlds of this package, whose [README] describes the language. [Options].Scripts
// and [Simulation].Scripts add a vendor's own.
//
// On systems other than Linux the package has only the parts that Simulate needs.
//
// [README]: https://github.com/go-proxier/proxier/blob/main/ruleset/conformance/worlds/README.md
package conformance
