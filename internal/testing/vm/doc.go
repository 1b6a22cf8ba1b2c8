// Package vm runs tests in another kernel than the running one. qemu boots a Debian kernel in
// a virtual machine, in a few seconds, without root and without changes to the host.
//
// A test calls [Inside] first if it needs a feature that the running kernel may lack:
//
//	func TestConformance(t *testing.T) {
//		if !vm.Inside(t, vm.IPVS) {
//			return
//		}
//		...
//	}
//
// Inside starts the test binary again, for this one test, in a kernel with the feature, where it returns true. If no
// machine can start, the test is skipped with one line that names what is missing, or fails with PROXIER_REQUIRE_ALL=1.
// The tests of a process share its machines, one for each of the host's processors.
//
// The command in the folder exec runs any other test in a machine, by go test's flag -exec:
//
//	PROXIER_VM_KERNEL=$(.ci/vm-kernel bullseye) go test -exec 'go run ./internal/testing/vm/exec' ./nftables
//
// # The machine
//
// The kernel and its modules are from Debian's package linux-image-amd64. Package vm looks for them below
// PROXIER_VM_KERNEL, below proxier/vm-kernel in the user's cache folder, where .ci/vm-kernel puts them, and among the
// installed kernels. The machine has busybox, the test binary, the package's testdata, and the host's nft, iptables,
// ipset, ipvsadm, conntrack, ip and systemd. A test runs as root and must restore what it changes.
//
// qemu emulates one processor, ten to twenty times slower than the host's. The machine's clock counts its instructions, so
// waiting costs nothing and a busy host delays no packet. PROXIER_VM_PROCESSORS=2 emulates two processors, with the host's
// clock. With PROXIER_VM_KVM=1 a machine uses KVM, two processors and the host's clock.
//
// The package exists on Linux only; elsewhere it is empty.
package vm
