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
	connections, err := n.Output("ipvsadm", "-Ln")
	if err != nil {
		return nil, err
	}
	servers, err := n.Output("ipvsadm", "-Sn")
	if err != nil {
		return nil, err
	}
	sets, err := n.Output("ipset", "save")
	if err != nil {
		return nil, err
	}
	kept := m.addServers(servers, sets, inUse(connections))
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
func (m meaning) addServers(servers, sets string, used map[string]bool) (kept map[string]bool) {
	marked := map[string]string{}
	kept = map[string]bool{}
	parsed, draining := parseServers(servers, used)
	for name, text := range parsed {
		if mark, ok := strings.CutPrefix(name, "-f "); ok {
			marked[mark] = text
			continue
		}
		if draining[name] {
			text += drains
			protocol, at, _ := strings.Cut(name, " ")
			if a, err := netip.ParseAddrPort(at); err == nil {
				kept[a.Addr().String()] = true
				kept[fmt.Sprintf("%v,%s:%d", a.Addr(), serverProtocols[protocol], a.Port())] = true
				kept[fmt.Sprintf("%t,%s:%d", a.Addr().Is6(), serverProtocols[protocol], a.Port())] = true
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
			mark += " -6"
		}
		text, ok := marked[mark]
		if err != nil || !ok {
			text = "no virtual server of mark " + mark
		}
		led[mark] = true
		m["set "+f[1]] = text
	}
	for mark, text := range marked {
		if !led[mark] && !draining["-f "+mark] {
			m["server that no set leads to: "+text] = "exists"
		}
	}
	return kept
}

// serverProtocols has ipset's name of the protocol of each option of ipvsadm.
var serverProtocols = map[string]string{"-t": "tcp", "-u": "udp", "--sctp-service": "sctp"}

// inUse returns the real servers with connections in the output of ipvsadm -Ln, each after its virtual
// server as parseServers names it.
func inUse(text string) map[string]bool {
	out := map[string]bool{}
	name := ""
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) < 3:
		case f[0] == "->" && len(f) == 6:
			if f[4] != "0" || f[5] != "0" {
				out[name+" "+f[1]] = true
			}
		case f[0] == "FWM":
			if name = "-f " + f[1]; f[2] == "IPv6" {
				name += " -6"
			}
		default:
			name = map[string]string{"TCP": "-t ", "UDP": "-u ", "SCTP": "--sctp-service "}[f[0]] + f[1]
		}
	}
	return out
}

// parseServers parses the output of ipvsadm -Sn. A virtual server's value is its options and its
// real servers in order. It leaves out real servers in use that drain: the traffic keeps open
// connections by an address that their Service has lost, or whose endpoints are others now. draining has
// the virtual servers without any other real server.
func parseServers(text string, used map[string]bool) (servers map[string]string, draining map[string]bool) {
	lines := map[string][]string{}
	draining = map[string]bool{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		// The options begin after the protocol and the address, or the mark and its family.
		name, rest := f[1]+" "+f[2], f[3:]
		if len(rest) != 0 && rest[0] == "-6" {
			name, rest = name+" -6", rest[1:]
		}
		if i := slices.Index(rest, "-r"); f[0] == "-a" && i >= 0 && strings.HasSuffix(line, " -w 0\n") && used[name+" "+rest[i+1]] {
			draining[name] = true
			continue
		}
		lines[name] = append(lines[name], strings.Join(append(f[:1:1], rest...), " "))
	}
	out := map[string]string{}
	for name, list := range lines {
		slices.Sort(list)
		out[name] = strings.Join(list, ", ")
		if len(list) > 1 { // the virtual server and a real one
			delete(draining, name)
		}
	}
	return out, draining
}
