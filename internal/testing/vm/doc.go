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
// The tests of a process share its machines. A machine boots for the first test that needs it,
// runs one test after the other and ends with the process. After each test it kills the processes
// that the test left. Tests that call t.Parallel before Inside use several machines, one for each
// of the host's processors.
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
// has nft, iptables, ipset, ipvsadm, conntrack, ip and systemd, with their libraries, if they are
// installed on the host. A test runs as root, in the machine's initial namespaces, and its
// working directory holds testdata. A test that changes what these namespaces or the kernel have
// in common must restore it.
//
// With PROXIER_VM_KVM=1 a machine uses KVM, two processors and the host's clock. Otherwise qemu
// emulates one processor, ten to twenty times slower than the host's, and the machine's clock
// counts its instructions: a nanosecond each. While the processor has nothing to do, the clock
// jumps to the next timer. So waiting costs nothing, a busy host delays no packet, and timeouts and
// stalls (package stall) are about the load in the machine alone. Times are comparable only with
// others of the same machine.
//
// With one processor, the kernel handles no packet while it executes a system call on another
// processor. PROXIER_VM_PROCESSORS=2 emulates two, with the host's clock, for tests of such races.
// Then everything takes longer, and a busy host makes packets late.
//
// The package exists on Linux only; elsewhere it is empty.
package vm
