package tracker

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Changes is what happened since the last [Tracker.Take].
type Changes struct {
	// Updates has one entry for each Service that may differ, in no particular
	// order. A Service that was changed and changed back may be in it.
	Updates []Update
	// Node is the node as it is now.
	Node NodeInfo
	// NodeChanged reports whether Node differs from the last Take's. Services
	// whose choice of endpoints it affects are in Updates.
	NodeChanged bool
}

// Update is one Service as it is now, in every family.
type Update struct {
	// Name is the Service's.
	Name types.NamespacedName
	// Ports is empty for a Service that is gone or that nothing is forwarded for.
	Ports []PortState
	// Triggers is when the changes to the Service's endpoints that are new in this
	// update were caused (annotation
	// endpoints.kubernetes.io/last-change-trigger-time), for measuring how long
	// they took to reach the kernel.
	Triggers []time.Time
}

// PortState is one Service port with its endpoints.
type PortState struct {
	// Port is never nil in what a Tracker yields.
	Port *ServicePort
	// Endpoints is every known endpoint of the port, whatever its conditions, by
	// address. It must not be written to.
	Endpoints []*Endpoint
}
