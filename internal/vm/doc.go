// Package vm runs a test in a kernel that has what the running one lacks: a
// Debian kernel in a virtual machine of its own, booted by qemu in about two
// seconds, without root and without touching the machine it runs on.
//
// It is one call at the beginning of a test:
//
//	func TestConformance(t *testing.T) {
//		if !vm.Inside(t, vm.IPVS) {
//			return
//		}
//		...
//	}
//
// [Inside] starts the test binary again, for this one test, where the kernel is
// right, and takes over how it ends. There it reports true. Where nothing can be
// started the test is skipped with one line that says what is missing, or fails if
// PROXIER_REQUIRE_ALL=1 is in the environment.
//
// # The machine
//
// The kernel is that of Debian's package linux-image-amd64 with its modules, as
// it lies below the folder that PROXIER_VM_KERNEL names, below proxier/vm-kernel
// in the user's cache folder (where .ci/vm-kernel puts it), or installed. Beside
// it there is an initial RAM file system, made anew each time: busybox, the test
// binary, the package's testdata, and nft, iptables, ipset, ipvsadm, conntrack and
// ip, as far as they are installed here, with the libraries they need. The test
// runs as root, in the machine's own namespaces, and its working directory holds
// testdata.
//
// qemu emulates the processor, since hardware support is not to be had everywhere:
// everything takes ten to twenty times longer. Timings mean nothing there but in
// comparison with others from the same run.
//
// The package exists on Linux only; elsewhere it is empty.
package vm
