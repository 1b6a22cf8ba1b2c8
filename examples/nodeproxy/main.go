// The Go runtime reads the CPU limit of its cgroup at the start. By default it would also wake up
// each second to read the limit again (runtime.SetDefaultGOMAXPROCS).

//go:debug updatemaxprocs=0

// Nodeproxy is a complete Service proxy for one node. It replaces kube-proxy and shows how
// the library's packages fit together. It reads Services and EndpointSlices from an API
// server or from files.
//
//	nodeproxy run [flags]             program the network namespace it runs in
//	nodeproxy run --cleanup           remove what run left there
//	nodeproxy run --init-only         set the kernel parameters that run needs
//	nodeproxy explain [flags] 10.0.0.10:80
//	                                  print what must happen to a packet, why, and
//	                                  whether the kernel agrees
//	nodeproxy render [flags]          print the rules that any node would have, or what a
//	                                  change of the manifests does to them
//	nodeproxy trace [flags] 10.0.0.10:80
//	                                  follow real connections through the kernel
//	nodeproxy top [flags]             show the traffic of each Service
//	nodeproxy demo                    show all of this with real packets, without privileges
//	nodeproxy demo --socket-lb        the same with --socket-lb of run, as root
//	nodeproxy completion SHELL        print completions for bash, zsh, fish or powershell
//	nodeproxy man DIR                 write manual pages
//
// "nodeproxy run --help" lists the flags in groups: nodeproxy's own, kube-proxy's, and those of
// logging. --config reads kube-proxy's configuration file. Options of kube-proxy that nodeproxy
// does not support are rejected by name. Run exits when the configuration in its file changes; its
// supervisor restarts it. If the changed file is invalid, run logs an error, sets the metric
// proxier_configuration_file_invalid to 1, and goes on with the previous content.
//
// The manual is in the folder deploy, a page for each reader: INSTALL.md, MODES.md, TAKEOVER.md,
// OPTIONS.md, SERVICES.md for authors of Services, IPVS.md, and TROUBLESHOOTING.md.
//
// # Code
//
// The verb run is package [github.com/go-proxier/proxier/examples/agent], which other programs can import,
// with what concerns a whole process. Its parts are in examples/internal/node: package objects reads
// objects and turns them into the ruleset; core brings the ruleset into the kernel, with the
// data planes of package modes, and serves metrics, health checks and the page of the
// configuration. Package takeover finds the rules of other proxies. Package config reads kube-proxy's
// flags and file. The rest is in the folder internal: package program starts the verbs, and package
// wholeagent tests the whole. Package run is the verb run. Package inspect has explain, trace and top,
// demo is a tour with real packets, in the network of package lab. The folder
// deploy has what an operator needs to run nodeproxy.
package main

import (
	"os"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/program"
)

func main() { os.Exit(program.Main()) }
