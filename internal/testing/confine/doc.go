// Package confine runs a test binary again with fewer privileges or resources than
// the test has: some capabilities only, few file descriptors, little memory. The process
// runs a role, a function of the test.
//
//	func TestMain(m *testing.M) {
//		confine.Roles{"agent": agent}.Enter()
//		netlab.Main(m)
//	}
//
//	cmd := confine.Command("agent", confine.Limits{Capabilities: []int{unix.CAP_NET_ADMIN}})
//
// The package exists on Linux only; elsewhere it is empty.
package confine
