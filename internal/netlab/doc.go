// Package netlab builds small networks out of real Linux network namespaces, for
// tests and for the demo: hosts that forward, route, listen and connect, joined
// by virtual Ethernet links. It needs no privileges beyond the right to make user
// namespaces.
//
// A test binary enters its own user and network namespaces by its TestMain:
//
//	func TestMain(m *testing.M) { netlab.Main(m) }
//
// and a test that needs the network says so first:
//
//	netlab.Require(t)
//	lab, err := netlab.New()
//	...
//	defer lab.Close()
//	node, err := lab.Host("node")
//	client, err := lab.Host("client")
//	err = lab.Link(node, "eth0", client, "eth0")
//	err = client.AddAddr("eth0", netip.MustParsePrefix("192.0.2.1/24"))
//	conn, err := client.Dial(ctx, "tcp", "", "192.0.2.2:80")
//
// Every [Host] is a namespace of its own, so any number of labs may be in use at
// the same time. Nothing outside of them is touched.
//
// The package exists on Linux only; elsewhere it is empty.
package netlab
