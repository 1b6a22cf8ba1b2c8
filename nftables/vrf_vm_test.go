//go:build linux

package nftables

import (
	"context"
	"io"
	"net"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestNodePortsAnswerInAVRF has the node's primary addresses on an interface in a VRF, where the kernel does
// not count them among the local ones. NodePorts at all addresses do not answer there.
func TestNodePortsAnswerInAVRF(t *testing.T) {
	testtime.NeedComplete(t)
	t.Parallel()
	if !vm.Inside(t, vm.Debian) {
		return
	}
	lab, hosts := netlab.NewHosts(t, "node", "client", "pod")
	node, client, pod := hosts["node"], hosts["client"], hosts["pod"]
	node.Forward()
	lab.Link(node, "eth0", client, "eth0")
	run := func(commands ...[]string) {
		t.Helper()
		for _, c := range commands {
			must.Get(node.Run(t, "ip", c...))(t)
		}
	}
	run([]string{"link", "add", "blue", "type", "vrf", "table", "100"}, []string{"link", "set", "blue", "up"}, []string{"link", "set", "eth0", "master", "blue"})
	primary := must.Get(ruleset.ParseNodePortAddresses([]string{"primary"}))(t)
	info := tracker.NodeInfo{Name: backendtest.ThisNode}
	pod.Pod(node, "veth1", [2]string{podAddr(tracker.IPv4, 0).String(), podAddr(tracker.IPv6, 0).String()}, podGateway)
	for _, f := range families {
		option, own := map[tracker.Family]string{tracker.IPv4: "-4", tracker.IPv6: "-6"}[f], nodeAddr[f]
		info.Addresses = append(info.Addresses, own.Addr())
		run([]string{"addr", "add", own.String(), "dev", "eth0"})
		for _, err := range []error{client.AddAddr("eth0", clientAddr[f]), client.AddRoute(everywhere[f], own.Addr(), "")} {
			if err != nil {
				t.Fatal(err)
			}
		}
		// Each side's routes have the other's addresses.
		run([]string{option, "route", "add", podAddr(f, 0).String(), "dev", "veth1", "table", "100"}, []string{option, "route", "add", own.Masked().String(), "dev", "eth0"})
		pod.ServeTCP(t, netip.AddrPortFrom(podAddr(f, 0), 8080).String(), func(c net.Conn) { io.Copy(c, c) })
	}
	p := must.Get(backendtest.NewPipeline(tracker.Config{Node: info}, ruleset.Config{NodePortAddresses: primary}))(t)
	r := &rig{TB: t, host: node, tracker: p.Tracker, engine: p.Engine}
	r.start()
	t.Cleanup(func() { r.backend.Close() })
	r.tracker.SetService(svc(0, func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = offloadNodePort
	}))
	for _, f := range families {
		r.tracker.SetSlice(epSlice(0, f, 1))
	}
	r.sync()
	r.verify()
	for _, f := range families {
		ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
		defer cancel()
		c, err := client.Dial(ctx, "tcp", "", netip.AddrPortFrom(nodeAddr[f].Addr(), offloadNodePort).String())
		if err != nil {
			t.Errorf("%v: %v", f, err)
			continue
		}
		c.Close()
	}
}
