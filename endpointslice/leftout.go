package endpointslice

import (
	"fmt"

	discovery "k8s.io/api/discovery/v1"
)

// LeftOut names a slice or Service, or a part of one, that is left out, and the reason.
type LeftOut struct {
	// Reason is the reason, never "".
	Reason Reason
	// Whole is set if the whole object is left out.
	Whole bool
	// Port is the name of the port that is left out, or nil if this is not about one port.
	Port *string
	// Expected is set if the object is valid and asks for this, so that there is nothing to
	// warn about.
	Expected bool
	// Err describes for people what is left out and why, never nil. Under
	// [ReasonHookFailed] it wraps the error of [Config].Make.
	Err error
}

// Reason is why an object, or a part of it, is left out. Package tracker documents all reasons.
type Reason string

// The reasons of slices. The fields in parentheses are those that a reason comes from.
const (
	// ReasonInvalid: the object is nil, or has no name or namespace (metadata).
	ReasonInvalid Reason = "ProxyInvalidObject"
	// ReasonHookFailed: [Config].Make rejected an endpoint.
	ReasonHookFailed Reason = "ProxyHookFailed"
	// ReasonLimitExceeded: the object has too many elements (ports times endpoints).
	ReasonLimitExceeded Reason = "ProxyLimitExceeded"
	// ReasonAddressType: the slice's addresses are no IP addresses (addressType).
	ReasonAddressType Reason = "ProxyAddressType"
	// ReasonNoService: no label names the Service of a slice.
	ReasonNoService Reason = "ProxyNoService"
	// ReasonPortName: a port has no name (ports[].name); "" is a name.
	ReasonPortName Reason = "ProxyPortName"
	// ReasonNoPortNumber: a port has no number, which means all ports (ports[].port). A
	// Service cannot use it.
	ReasonNoPortNumber Reason = "ProxyNoPortNumber"
	// ReasonPortNumber: the number of a port is out of range (ports[].port).
	ReasonPortNumber Reason = "ProxyPortNumber"
	// ReasonProtocol: the protocol of a port is not TCP, UDP or SCTP (ports[].protocol).
	ReasonProtocol Reason = "ProxyProtocol"
	// ReasonAddress: an address is missing, or is not that of one host
	// (endpoints[].addresses).
	ReasonAddress Reason = "ProxyAddress"
	// ReasonFurtherAddress: an endpoint has more than one address (endpoints[].addresses).
	// The API defines a meaning for the first only.
	ReasonFurtherAddress Reason = "ProxyFurtherAddress"
	// ReasonFamilyMismatch: an address is not of the family that the object declares
	// (addressType).
	ReasonFamilyMismatch Reason = "ProxyFamilyMismatch"
	// ReasonDuplicate: the object has the same address before (endpoints[].addresses).
	ReasonDuplicate Reason = "ProxyDuplicate"
)

func (c *Cache[E]) leave(l LeftOut, format string, args ...any) {
	if c.config.Report != nil {
		l.Err = fmt.Errorf(format, args...)
		c.left = append(c.left, l)
	}
}

func (c *Cache[E]) report(s *discovery.EndpointSlice) {
	if len(c.left) > 0 {
		left := c.left
		c.left = nil
		c.config.Report(s, left)
	}
}
