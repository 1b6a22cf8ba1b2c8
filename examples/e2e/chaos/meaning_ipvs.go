//go:build linux

package main

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// ipvsMeaning reads the virtual servers, sets, addresses and rules of mode ipvs.
func ipvsMeaning(n *node, _ environment) (meaning, error) {
	m := meaning{}
	if err := m.addRules(n); err != nil {
		return nil, err
	}
	servers, err := n.Output("ipvsadm", "-Ln")
	if err != nil {
		return nil, err
	}
	sets, err := n.Output("ipset", "save")
	if err != nil {
		return nil, err
	}
	kept := m.addServers(servers, sets)
	addresses, err := n.Output("ip", "-o", "addr", "show", "kube-ipvs0")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(addresses) {
		if f := strings.Fields(line); len(f) > 3 {
			m.keep("address "+f[3], kept[strings.Split(f[3], "/")[0]])
		}
	}
	return m, nil
}

// keep adds a fact that something exists, with drains if only open connections keep it.
func (m meaning) keep(name string, drain bool) {
	if m[name] = "exists"; drain {
		m[name] += drains
	}
}

var (
	// setSize matches properties of a set that depend on its history.
	setSize = regexp.MustCompile(` (hashsize|initval|bucketsize) \S+`)
	// nodePortSet matches the name of a set of NodePorts, whose entries are ports.
	nodePortSet = regexp.MustCompile(`^KUBE-(6-)?NODE-PORT-(?:LOCAL-)?(TCP|UDP)$`)
	skbMark     = regexp.MustCompile(`^(.*) skbmark (0x[0-9a-f]+)(/0x[0-9a-f]+)?$`)
)

// addServers adds virtual servers and elements of sets. The agent chooses the marks of virtual
// servers: an element that sets one means the virtual server.
//
// A virtual server whose Service is gone stays until its connections end. addServers returns the
// addresses of these, and of each server "ADDRESS,PROTOCOL:PORT" and "IS6,PROTOCOL:PORT", if it is one of a
// NodePort: their elements of sets stay, too.
func (m meaning) addServers(servers, sets string) (kept map[string]bool) {
	marked := map[string]string{}
	kept = map[string]bool{}
	parsed, draining := parseServers(servers)
	for name, text := range parsed {
		if mark, ok := strings.CutPrefix(name, "fwm "); ok {
			marked[mark] = text
			continue
		}
		if draining[name] {
			text += drains
			protocol, at, _ := strings.Cut(name, " ")
			if a, err := netip.ParseAddrPort(at); err == nil {
				kept[a.Addr().String()] = true
				kept[fmt.Sprintf("%v,%s:%d", a.Addr(), protocol, a.Port())] = true
				kept[fmt.Sprintf("%t,%s:%d", a.Addr().Is6(), protocol, a.Port())] = true
			}
		}
		m["server "+name] = text
	}
	led := map[string]bool{}
	for line := range strings.Lines(sets) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "create ") {
			m["set "+setSize.ReplaceAllString(line, "")] = "exists"
			continue
		}
		f := skbMark.FindStringSubmatch(line)
		if f == nil {
			name, entry, _ := strings.Cut(strings.TrimPrefix(line, "add "), " ")
			if f := nodePortSet.FindStringSubmatch(name); f != nil {
				entry = fmt.Sprintf("%t,%s:%s", f[1] != "", strings.ToLower(f[2]), entry)
			}
			m.keep("set "+line, kept[entry])
			continue
		}
		n, err := strconv.ParseUint(f[2], 0, 32)
		mark := fmt.Sprint(n)
		if strings.HasPrefix(line, "add KUBE-6-") {
			mark += " IPv6"
		}
		text, ok := marked[mark]
		if err != nil || !ok {
			text = "no virtual server of mark " + mark
		}
		led[mark] = true
		m["set "+f[1]] = text
	}
	for mark, text := range marked {
		if !led[mark] && !draining["fwm "+mark] {
			m["server that no set leads to: "+text] = "exists"
		}
	}
	return kept
}

// parseServers parses the output of ipvsadm -Ln. A virtual server's value is its options and its
// real servers in order. It leaves out real servers of weight 0 that have connections: the traffic keeps
// open connections by an address that their Service has lost, or whose endpoints are others now. draining
// has the virtual servers without any other real server.
func parseServers(text string) (servers map[string]string, draining map[string]bool) {
	lists := map[string][]string{}
	draining = map[string]bool{}
	name := ""
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) < 3:
		case slices.Contains([]string{"TCP", "UDP", "SCTP", "FWM"}, f[0]):
			name = strings.ToLower(f[0]) + " " + f[1]
			if f = f[2:]; f[0] == "IPv6" {
				name, f = name+" IPv6", f[1:]
			}
			lists[name] = []string{strings.Join(f, " ")}
		case name == "" || f[0] != "->" || len(f) != 6: // a title
		case f[3] == "0" && (f[4] != "0" || f[5] != "0"):
			draining[name] = true
		default:
			lists[name] = append(lists[name], strings.Join(f[1:4], " ")) // address, method and weight
		}
	}
	servers = map[string]string{}
	for name, list := range lists {
		slices.Sort(list[1:])
		servers[name] = strings.Join(list, ", ")
		if len(list) > 1 {
			delete(draining, name)
		}
	}
	return servers, draining
}
