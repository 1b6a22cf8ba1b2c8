// Package conformance tests that a [ruleset.Backend] treats packets as
// Kubernetes defines it, in the manner of testing/fstest: the caller says how the
// backend is made, and [Run] drives it through a series of worlds.
//
// A world is a small cluster around one node, built of real network namespaces,
// for which no privileges are needed but the right to make user namespaces: local
// pods, the pods of another node, and clients outside. Services and
// EndpointSlices are handed to a real [tracker.Tracker], the backend is driven
// by a real [ruleset.Engine] and [ruleset.Cursor], and then connections are made
// from everywhere to everything. Every one of them is judged by
// [ruleset.Snapshot.Trace]: which endpoints may answer, and all of them must in
// turn; whether they see the client's address or the node's; whether a
// connection is refused or gets no answer. Each world is a sub-test, and ends with
// the first of its steps in which something was wrong; both address
// families are tested in it.
//
// A vendor's test of a backend of its own is this, in a package with nothing else
// in it that minds running in a namespace of its own:
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
// A backend programs whatever it likes in the node's namespace ([Env.NetNS]), where
// New and every Apply are called on a thread inside of it: a program that is
// started there, or a socket opened, belongs to the node; [Env.Do] leads there at
// other times. The node routes for the others. Worlds run in parallel, each with a
// backend and namespaces of its own; they mostly wait, and -parallel 8 makes the
// suite a matter of ten seconds on two processors.
//
// What a data plane cannot do is declared in [Options.Skip], by [Feature]; its
// worlds are then reported as skipped, with the reason. Where namespaces cannot be
// made, all are.
//
// A backend's author has more to prove than the suite knows: for that there is
// [NewWorld], and above all [World.Churn], which makes connections without end
// while something is done to the backend, and reports each one that failed.
//
// # Without packets
//
// [Simulate] needs neither privileges nor Linux and takes seconds. It drives a backend
// through the same worlds, and through random ones, and asks a function of the
// caller's, [Plane.Handle], what becomes of a packet. That function looks the packet up
// in what the backend has written, in a map in memory in place of the kernel's or the
// switch's tables. Writes fail, processes restart, frontends move between Services,
// and each state between two writes is judged as well:
//
//	func TestSimulation(t *testing.T) {
//		conformance.Simulate(t, conformance.Simulation{
//			New: func(tb testing.TB, env conformance.SimEnv) conformance.Plane {
//				tables := newFakeTables(env.Fail, env.Look)
//				return conformance.Plane{
//					Backend: func() ruleset.Backend { return mybackend.New(tables) },
//					Handle:  tables.handle,
//				}
//			},
//		})
//	}
//
// It shows that the backend writes the right things in the right order. That the data
// plane does the right thing with them is for [Run]. The random worlds are those of
// package worldgen, which can be used alone.
//
// On systems other than Linux the package has the parts that Simulate needs and no
// others.
package conformance
