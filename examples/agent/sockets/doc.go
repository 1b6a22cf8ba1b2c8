// Package sockets gives an [agent.Agent] the data plane of --socket-lb, which is package
// socketlb. It is a separate package because it depends on github.com/cilium/ebpf:
//
//	a, err := agent.New(ctx, agent.Options{Config: c, SocketLB: sockets.LB()})
//
// An Agent without it refuses --socket-lb. One with it also removes the programs that an earlier run
// with --socket-lb left, after its rules are in effect.
//
// Like package agent, this package is meant to be imported.
package sockets
