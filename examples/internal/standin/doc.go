// Package standin runs Windows programs that use the Host Networking Service (HNS) on Linux. Wine
// runs the program, and three small DLLs take the place of the service's. They pass each call to a
// [Server], which answers from a service in memory, [fakehns.Service].
//
//	w := standin.Start(t)               // skips the test without Wine
//	s := &standin.Server{Listener: listener}
//	s.Use(service)
//	go s.Serve()
//	cmd := w.Command("kube-proxy.exe", "--network-name=cluster")
//	cmd.Env = append(cmd.Environ(), s.Env())
//
// The stand-in answers hnslib's calls for networks, endpoints and load balancers. It moves no packets.
package standin
