//go:build linux

package main

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// nftTable is a listing of one of the agent's tables.
type nftTable struct {
	// sets holds the elements of sets and maps by their keys.
	sets map[string]map[string]nftElement
	// chains and flowtables hold their lines by name.
	chains, flowtables map[string][]string
}

type nftElement struct{ value, comment string }

var (
	nftBlock = regexp.MustCompile(`(?m)^\t(map|set|chain|flowtable) (\S+) \{\n((?:\t\t.*\n|\n)*)\t\}$`)
	nftEntry = regexp.MustCompile(`([^,"]+?)(?: comment "([^"]*)")?(?: : ([^,]+?))?\s*(?:,\s*|$)`)
)

// parseNFT parses the output of nft -s list table.
func parseNFT(text string) *nftTable {
	t := &nftTable{map[string]map[string]nftElement{}, map[string][]string{}, map[string][]string{}}
	for _, m := range nftBlock.FindAllStringSubmatch(text, -1) {
		lines := strings.Split(strings.TrimSpace(m[3]), "\n")
		for i := range lines {
			lines[i] = strings.TrimSpace(lines[i])
		}
		switch name := m[2]; m[1] {
		case "chain":
			t.chains[name] = lines
		case "flowtable":
			t.flowtables[name] = lines
		default:
			_, list, _ := strings.Cut(strings.Join(lines, " "), "elements = { ")
			t.sets[name] = map[string]nftElement{}
			for _, e := range nftEntry.FindAllStringSubmatch(strings.TrimSuffix(list, " }"), -1) {
				t.sets[name][e[1]] = nftElement{value: e[3], comment: e[2]}
			}
		}
	}
	return t
}

// classID parses a dispatch key or another number that nft prints as a class ID.
func classID(s string) uint32 {
	hi, lo, _ := strings.Cut(s, ":")
	a, _ := strconv.ParseUint(hi, 16, 16)
	b, _ := strconv.ParseUint(lo, 16, 16)
	return uint32(a)<<16 | uint32(b)
}

// The parts of dispatch keys, which nftables/DESIGN.md describes.
const (
	handlerBits = 0xfff00000
	poolBits    = 0x000fffff
)

// pools returns the endpoints of each pool by the number of their bucket.
func (t *nftTable) pools() map[uint32][]string {
	out := map[uint32][]string{}
	for _, name := range []string{"tcp-endpoints", "udp-endpoints", "sctp-endpoints"} {
		for k, v := range t.sets[name] {
			pool, bucket, _ := strings.Cut(k, " . ")
			out[classID(pool)] = append(out[classID(pool)], bucket+" "+v.value)
		}
	}
	for k, v := range t.sets["sticky-buckets"] {
		pool, bucket, _ := strings.Cut(k, " . ")
		member, ok := t.sets["sticky-endpoints"][v.value]
		if !ok {
			member.value = "unknown member " + v.value
		}
		// The pool of a Service with affinity is the upper half of a class ID.
		id := classID(pool) >> 16
		out[id] = append(out[id], bucket+" "+member.value)
	}
	for _, list := range out {
		slices.Sort(list)
	}
	return out
}

// unordered returns a pool's endpoints without the numbers of their buckets. Only a hash depends on them.
func unordered(list []string) []string {
	var out []string
	for _, e := range list {
		_, ep, _ := strings.Cut(e, " ")
		out = append(out, ep)
	}
	slices.Sort(out)
	return out
}

// dispatchMaps lists the maps of dispatch keys, and the maps of handlers that each leads to.
var dispatchMaps = []struct{ frontends, handlers string }{
	{"service-ips", "handlers"}, {"service-nodeports", "handlers"},
	{"internal-service-ips", "internal-handlers"}, {"internal-service-nodeports", "internal-handlers"},
	{"service-ips", "own-handlers"}, {"service-nodeports", "own-handlers"},
}

// stickyChain returns the chain of a pool with client affinity, or "" for other pools.
func (t *nftTable) stickyChain(pool uint32) string {
	value, ok := t.sets["sticky-pools"][fmt.Sprintf("%x:%x", pool>>16, pool&0xffff)]
	if !ok {
		return ""
	}
	_, handler, _ := strings.Cut(value.value, ":")
	chain, ok := t.sets["sticky-handlers"]["0:"+handler]
	if !ok {
		return "no sticky handler " + handler
	}
	return strings.TrimPrefix(chain.value, "goto ")
}

// hashInName is in the names of chains that choose an endpoint by its bucket.
const hashInName = "-by-"

// addFrontends adds what happens to connections to each frontend, and returns the chains that
// are in use.
func (t *nftTable) addFrontends(m meaning, family string) (used []string) {
	pools := t.pools()
	for _, d := range dispatchMaps {
		for to, frontend := range t.sets[d.frontends] {
			id := classID(frontend.value)
			handler, ok := t.sets[d.handlers][fmt.Sprintf("%x:0", id&handlerBits>>16)]
			switch {
			case ok:
			case d.handlers == "own-handlers":
				continue // only some handlers treat what the node sends to itself
			default:
				handler.value = "no handler"
			}
			chain := strings.TrimPrefix(handler.value, "goto ")
			used = append(used, chain)
			if sticky := t.stickyChain(id & poolBits); sticky != "" {
				used = append(used, sticky)
				chain += " " + sticky
			}
			list := pools[id&poolBits]
			if !strings.Contains(chain, hashInName) {
				list = unordered(list)
			}
			m[fmt.Sprintf("%s %s: %s by %s", family, d.frontends, to, d.handlers)] = fmt.Sprintf("%q: %s %s", frontend.comment, chain, strings.Join(list, ", "))
		}
	}
	return used
}

var (
	// ownSets holds numbers and counters, which meaning leaves out or resolves.
	ownSets = regexp.MustCompile(`^((tcp|udp|sctp)-endpoints|sticky-.*|(internal-|own-)?handlers|(internal-)?service-(ips|nodeports)|connections|refused-packets|dropped-packets|hairpin-connections)$`)
	// fixedChain matches the chains that always exist.
	fixedChain = regexp.MustCompile(`^(nat-|filter-|own-|services$|nodeports$|internal$|masquerading$|cluster-ips-check$)`)
	// sourceSet matches a set of source ranges, which stays when it is empty.
	sourceSet = regexp.MustCompile(`@(allowed-sources-\d+)`)
)

// nftMeaning reads the agent's tables of both families.
func nftMeaning(n *node, _ environment) (meaning, error) {
	m := meaning{}
	for _, family := range []string{"ip", "ip6"} {
		text, err := n.Output("nft", "-s", "list", "table", family, "proxier")
		if err != nil {
			return nil, err
		}
		parseNFT(text).addTo(m, family)
	}
	return m, nil
}

func (t *nftTable) addTo(m meaning, family string) {
	used := t.addFrontends(m, family)
	for name, elements := range t.sets {
		if ownSets.MatchString(name) {
			continue
		}
		for k, v := range elements {
			m[family+" "+name+": "+k] = v.value
		}
	}
	for name := range t.chains {
		if fixedChain.MatchString(name) {
			used = append(used, name)
		}
	}
	reached := reachable(used, t.chains)
	for name, lines := range t.chains {
		if reached[name] {
			m[family+" chain "+name] = strings.Join(t.rules(lines), "; ")
		}
	}
	for name, lines := range t.flowtables {
		m[family+" flowtable "+name] = strings.Join(lines, "; ")
	}
}

// rules returns the lines of a chain without look-ups in empty sets of source ranges. The order
// of the others does not count.
func (t *nftTable) rules(lines []string) (out []string) {
	var lookups []string
	for _, line := range lines {
		set := sourceSet.FindStringSubmatch(line)
		switch {
		case set == nil:
			out = append(out, line)
		case len(t.sets[set[1]]) != 0:
			lookups = append(lookups, line)
		}
	}
	slices.Sort(lookups)
	return append(lookups, out...)
}
