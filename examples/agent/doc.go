// Package agent is nodeproxy as a Go call: the complete Service proxy of one node, for programs that run
// kube-proxy in their own process, such as distributions of Kubernetes with one binary, and simulators
// of many nodes. Command nodeproxy is this package with flags, verbs and the settings of a process.
//
//	config, err := agent.ParseArgs(args, nil) // kube-proxy's flags and configuration file
//	...
//	a, err := agent.New(ctx, agent.Options{Config: config, NodeName: name, Client: client, Log: log})
//	if err != nil {
//		return err // nothing has changed
//	}
//	err = a.Run(ctx) // nil after ctx ends; the rules stay
//
// # What belongs to the program
//
// The package reads no arguments, environment, host name or working directory of its own. It handles no signals
// and does not exit. It leaves klog, flag.CommandLine, http.DefaultServeMux, GOMAXPROCS, oom_score_adj,
// capabilities and the default registry of metrics alone. It listens at the addresses of the configuration only
// with Options.Serve (health-check node ports always listen), and sets the machine's parameters of connection tracking
// only with Options.Tune. The data planes of modes iptables and ipvs set parameters of their network namespace.
//
// After Run has returned, no goroutine, socket, timer or file of the Agent is left. A panic of one of its
// goroutines is an error of Run that wraps [ErrPanic]. A panic in a sync fails this sync: the Agent logs it and
// tries again.
//
// # Several Agents in one process
//
// Each Agent needs a network namespace of its own (Options.NetNS), or a data plane of its own
// (Options.Backend), such as [Discard]. With Options.Registerer each needs other Options.Labels. Options.Files
// bounds what an Agent may open.
//
// # Objects
//
// With a Client the agent follows the API server without keeping objects. A program that has informers
// passes [Informers] as the Source; one with other objects writes a [Source] of its own.
package agent
