package tracker

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Changes is the result of [Tracker.Take]: what changed since the previous Take.
type Changes struct {
	// Updates has one entry for each Service that may differ, in no particular
	// order. A Service that was changed and changed back may be in it.
	Updates []Update
	// Node is the current node. Updates includes the Services whose endpoint selection a
	// change of the node changes.
	Node NodeInfo
}

// Update is the current state of one Service, in every family.
type Update struct {
	// Name is the name of the Service.
	Name types.NamespacedName
	// Ports is empty if the Service was deleted or has no usable port.
	Ports []PortState
	// Triggers holds the times at which the endpoint changes in this update were
	// caused (annotation endpoints.kubernetes.io/last-change-trigger-time). Callers
	// use them to measure how long a change takes to reach the kernel.
	Triggers []time.Time
}

// PortState is one Service port with its endpoints.
type PortState struct {
	// Port is never nil in the result of Take.
	Port *ServicePort
	// Endpoints holds every known endpoint of the port, whatever its conditions,
	// sorted by address. It must not be modified.
	Endpoints []*Endpoint
}
