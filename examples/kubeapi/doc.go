// Package kubeapi connects a node agent to the Kubernetes API. [ClientConfig] finds the
// API server, and [NewRecorder] writes Events:
//
//	config, err := kubeapi.ClientConfig(connection, "")
//	client, err := kubeapi.NewClient(config)
//	recorder := kubeapi.NewRecorder(client.Core, "my-proxy", nodeName, log)
//
// Package informers, beside this one, passes the objects to a tracker.
package kubeapi
