package standin

import (
	"encoding/json"
	"errors"
	"strings"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
)

// enumerate returns the IDs of the objects that a query selects.
func enumerate(service *fakehns.Service, kind string, query []byte) ([]string, error) {
	var q struct{ Filter string }
	if err := json.Unmarshal(query, &q); err != nil {
		return nil, err
	}
	var want struct{ ID, Name, VirtualNetwork, HostComputeNetwork string }
	if q.Filter != "" {
		if err := json.Unmarshal([]byte(q.Filter), &want); err != nil {
			return nil, err
		}
	}
	out := []string{}
	add := func(id, name, network string) {
		if (want.ID == "" || strings.EqualFold(want.ID, id)) && (want.Name == "" || want.Name == name) &&
			(want.VirtualNetwork == "" || strings.EqualFold(want.VirtualNetwork, network)) &&
			(want.HostComputeNetwork == "" || strings.EqualFold(want.HostComputeNetwork, network)) {
			out = append(out, id)
		}
	}
	switch kind {
	case network:
		n, err := service.Current()
		if add(n.ID, n.Name, ""); err != nil {
			return nil, err
		}
	case endpoint:
		list, err := service.Endpoints()
		for _, e := range list {
			add(e.ID, e.Name, e.Network)
		}
		return out, err
	case loadBalancer:
		list, err := service.LoadBalancers()
		for _, lb := range list {
			add(lb.ID, "", "")
		}
		return out, err
	}
	return out, nil
}

// object returns an object, which is encoded as its document.
func object(service *fakehns.Service, kind, id string) (any, error) {
	switch kind {
	case network:
		n, err := service.Current()
		if err == nil && !strings.EqualFold(n.ID, id) {
			err = winkernel.Code(0x803b0001) // HCN_E_NETWORK_NOT_FOUND
		}
		return n, err
	case endpoint:
		e, err := service.Endpoint(id)
		e.MAC = strings.ToUpper(e.MAC) // as Windows does
		return e, err
	}
	return service.LoadBalancer(id)
}

// createEndpoint creates the endpoint of a document.
func createEndpoint(service *fakehns.Service, network string, body []byte) (string, error) {
	var e winkernel.Endpoint
	if err := json.Unmarshal(body, &e); err != nil {
		return "", err
	}
	e.Network = network
	made, err := service.CreateEndpoint(e)
	return made.ID, err
}

// writeLoadBalancer creates or modifies the load balancer of a document.
func writeLoadBalancer(service *fakehns.Service, verb, id string, body []byte) (string, error) {
	var lb winkernel.LoadBalancer
	if err := json.Unmarshal(body, &lb); err != nil {
		return "", err
	}
	if lb.Frontend == (winkernel.Frontend{}) {
		return "", errors.New("the load balancer has no port, or several")
	}
	if verb == "Modify" {
		lb.ID = id
		_, err := service.ModifyLoadBalancer(lb)
		return id, err
	}
	made, err := service.CreateLoadBalancer(lb)
	return made.ID, err
}
