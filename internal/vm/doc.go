// Package vm runs tests in another kernel than the running one: a Debian kernel in a
// virtual machine, which qemu boots in about two seconds, without root and without changing
// anything on the host.
//
// A test that needs a feature that the running kernel may lack calls [Inside] first:
//
//	func TestConformance(t *testing.T) {
//		if !vm.Inside(t, vm.IPVS) {
//			return
//		}
//		...
//	}
//
// Inside starts the test binary again, for this one test, where the kernel has the feature,
// and passes or fails with it. There it returns true. If no machine can be started, the test
// is skipped with one line that names what is missing, or fails if PROXIER_REQUIRE_ALL=1 is in
// the environment.
//
// Any other test runs in a machine by go test's flag -exec, with the command in the folder
// exec:
//
//	PROXIER_VM_KERNEL=$(.ci/vm-kernel bullseye) go test -exec 'go run ./internal/vm/exec' ./nftables
//
// # The machine
//
// The kernel is that of Debian's package linux-image-amd64 with its modules. Package vm looks
// for it below the folder that PROXIER_VM_KERNEL names, below proxier/vm-kernel in the user's
// cache folder, where .ci/vm-kernel puts it, and among the installed ones. An initial RAM file
// system, written for each boot, holds busybox, the test binary, the package's testdata, and
// nft, iptables, ipset, ipvsadm, conntrack and ip, as far as they are installed on the host,
// with the libraries they need. The test runs as root, in the machine's initial namespaces, and
// its working directory holds testdata.
//
// qemu emulates the processor, since hardware support is not always available: everything takes
// ten to twenty times longer. Timings are comparable only with others from the same run.
//
// The package exists on Linux only; elsewhere it is empty.
package vm
