// Package vm runs tests in another kernel than the running one. qemu boots a Debian kernel in
// a virtual machine, in a few seconds, without root and without changes to the host.
//
// A test calls [Inside] first if it needs a feature that the running kernel may lack:
//
//	func TestConformance(t *testing.T) {
//		if !vm.Inside(t, vm.IPVS, "") {
//			return
//		}
//		...
//	}
//
// Inside starts the test binary again, for this one test, in a kernel with the feature. The test
// passes or fails as that process does. In that process, Inside returns true. If no machine can
// start, the test is skipped with one line that names what is missing. With
// PROXIER_REQUIRE_ALL=1 in the environment, it fails instead.
//
// The command in the folder exec runs any other test in a machine, by go test's flag -exec:
//
//	PROXIER_VM_KERNEL=$(.ci/vm-kernel bullseye) go test -exec 'go run ./internal/testing/vm/exec' ./nftables
//
// # The machine
//
// The kernel and its modules are from Debian's package linux-image-amd64. Package vm looks for
// them below the folder that PROXIER_VM_KERNEL names, below proxier/vm-kernel in the user's
// cache folder, where .ci/vm-kernel puts them, and among the installed kernels. Each boot writes
// an initial RAM file system with busybox, the test binary and the package's testdata. It also
// has nft, iptables, ipset, ipvsadm, conntrack and ip, with their libraries, if they are
// installed on the host. The test runs as root, in the machine's initial namespaces, and its
// working directory holds testdata.
//
// qemu emulates the processor, since hardware support is not always available. Everything takes
// ten to twenty times longer. Timings are comparable only with others of the same run.
//
// The package exists on Linux only; elsewhere it is empty.
package vm
