// Package netlab builds small networks of Linux network namespaces, for tests and for the
// demo: hosts that forward, route, listen and connect, joined by virtual Ethernet links.
// The only privilege it needs is to create user namespaces.
//
// The TestMain of a test binary enters user and network namespaces of its own:
//
//	func TestMain(m *testing.M) { netlab.Main(m) }
//
// A test that needs the network gets hosts, or skips:
//
//	lab, hosts := netlab.NewHosts(t, "node", "client")
//	lab.Link(hosts["node"], "eth0", hosts["client"], "eth0")
//	hosts["client"].Addrs("eth0", "192.0.2.1/24")
//	conn, err := hosts["client"].Dial(ctx, "tcp", "", "192.0.2.2:80")
//
// Every [Host] is a namespace of its own. A lab changes nothing outside of its hosts.
//
// The package exists on Linux only; elsewhere it is empty.
package netlab
