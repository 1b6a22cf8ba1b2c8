//go:build linux

package main

import (
	"fmt"
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
	servers, err := n.Output("ipvsadm", "-Sn")
	if err != nil {
		return nil, err
	}
	sets, err := n.Output("ipset", "save")
	if err != nil {
		return nil, err
	}
	m.addServers(servers, sets)
	addresses, err := n.Output("ip", "-o", "addr", "show", "kube-ipvs0")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(addresses) {
		if f := strings.Fields(line); len(f) > 3 {
			m["address "+f[3]] = "exists"
		}
	}
	return m, nil
}

var (
	// setSize matches properties of a set that depend on its history.
	setSize = regexp.MustCompile(` (hashsize|initval|bucketsize) \S+`)
	skbMark = regexp.MustCompile(`^(.*) skbmark (0x[0-9a-f]+)(/0x[0-9a-f]+)?$`)
)

// addServers adds virtual servers and elements of sets. The agent chooses the marks of virtual
// servers: an element that sets one means the virtual server.
func (m meaning) addServers(servers, sets string) {
	marked := map[string]string{}
	for name, text := range parseServers(servers) {
		if mark, ok := strings.CutPrefix(name, "-f "); ok {
			marked[mark] = text
			continue
		}
		m["server "+name] = text
	}
	used := map[string]bool{}
	for line := range strings.Lines(sets) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "create ") {
			m["set "+setSize.ReplaceAllString(line, "")] = "exists"
			continue
		}
		f := skbMark.FindStringSubmatch(line)
		if f == nil {
			m["set "+line] = "exists"
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
		used[mark] = true
		m["set "+f[1]] = text
	}
	for mark, text := range marked {
		if !used[mark] {
			m["server that no set leads to: "+text] = "exists"
		}
	}
}

// parseServers parses the output of ipvsadm -Sn. A virtual server's value is its options and its
// real servers in order.
func parseServers(text string) map[string]string {
	lines := map[string][]string{}
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
		lines[name] = append(lines[name], strings.Join(append(f[:1:1], rest...), " "))
	}
	out := map[string]string{}
	for name, list := range lines {
		slices.Sort(list)
		out[name] = strings.Join(list, ", ")
	}
	return out
}
