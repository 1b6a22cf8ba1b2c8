// Package wholeagent tests nodeproxy as a whole. Most of its tests start the command in the network
// of package lab or beside a kube-apiserver, change objects, and look at packets, logs and metrics.
package wholeagent
