//go:build linux

package main

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// nftTable is a listing of one of the agent's tables.
type nftTable struct {
	// sets holds the elements of sets and maps, without comments: values by keys.
	sets map[string]map[string]string
	// names holds the comments of elements of the maps of frontends.
	names map[string]map[string]string
	// blocks holds the lines of chains and flowtables by kind and name.
	blocks map[string][]string
}

var (
	nftBlock   = regexp.MustCompile(`^\t(map|set|chain|flowtable) (\S+) \{$`)
	nftComment = regexp.MustCompile(` comment "([^"]*)"`)
)

// parseNFT parses the output of nft -s list table.
func parseNFT(text string) *nftTable {
	t := &nftTable{sets: map[string]map[string]string{}, names: map[string]map[string]string{}, blocks: map[string][]string{}}
	var kind, name, elements string
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if m := nftBlock.FindStringSubmatch(line); m != nil {
			kind, name, elements = m[1], m[2], ""
			t.blocks[kind+" "+name] = nil
			continue
		}
		inner := strings.TrimSpace(line)
		switch {
		case kind == "" || inner == "":
		case line == "\t}":
			if kind == "map" || kind == "set" {
				t.addElements(name, elements)
			}
			kind = ""
		case (kind == "map" || kind == "set") && (elements != "" || strings.HasPrefix(inner, "elements = {")):
			elements += " " + inner
		default:
			t.blocks[kind+" "+name] = append(t.blocks[kind+" "+name], inner)
		}
	}
	return t
}

// addElements adds the elements of a set or map, as listed.
func (t *nftTable) addElements(set, list string) {
	t.sets[set], t.names[set] = map[string]string{}, map[string]string{}
	list = strings.TrimSuffix(strings.TrimPrefix(strings.TrimSpace(list), "elements = {"), "}")
	var comments []string
	list = nftComment.ReplaceAllStringFunc(list, func(c string) string {
		comments = append(comments, nftComment.FindStringSubmatch(c)[1])
		return fmt.Sprintf(" #%d", len(comments)-1)
	})
	for e := range strings.SplitSeq(list, ",") {
		k, v, _ := strings.Cut(e, " : ")
		k, comment, named := strings.Cut(strings.TrimSpace(k), " #")
		if k == "" {
			continue
		}
		t.sets[set][k] = strings.TrimSpace(v)
		if n, err := strconv.Atoi(strings.TrimSpace(comment)); named && err == nil {
			t.names[set][k] = comments[n]
		}
	}
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
			out[classID(pool)] = append(out[classID(pool)], bucket+" "+v)
		}
	}
	for k, v := range t.sets["sticky-buckets"] {
		pool, bucket, _ := strings.Cut(k, " . ")
		member, ok := t.sets["sticky-endpoints"][v]
		if !ok {
			member = "unknown member " + v
		}
		// The pool of a Service with affinity is the upper half of a class ID.
		id := classID(pool) >> 16
		out[id] = append(out[id], bucket+" "+member)
	}
	for id, list := range out {
		slices.Sort(list)
		// Only a hash depends on the bucket. The dispatch below adds the order if it counts.
		out[id] = list
	}
	return out
}

// unordered returns a pool's endpoints without the numbers of their buckets.
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
	_, handler, _ := strings.Cut(value, ":")
	chain, ok := t.sets["sticky-handlers"]["0:"+handler]
	if !ok {
		return "no sticky handler " + handler
	}
	return strings.TrimPrefix(chain, "goto ")
}

// hashInName is in the names of chains that choose an endpoint by its bucket.
const hashInName = "-by-"

// addFrontends adds what happens to connections to each frontend, and returns the chains that
// are in use.
func (t *nftTable) addFrontends(m meaning, family string) (used map[string]bool) {
	used = map[string]bool{}
	pools := t.pools()
	for _, d := range dispatchMaps {
		for to, value := range t.sets[d.frontends] {
			id := classID(value)
			chain, ok := t.sets[d.handlers][fmt.Sprintf("%x:0", id&handlerBits>>16)]
			if !ok && d.handlers == "own-handlers" {
				continue // only some handlers treat what the node sends to itself
			}
			if !ok {
				chain = "no handler"
			}
			chain = strings.TrimPrefix(chain, "goto ")
			used[chain] = true
			if sticky := t.stickyChain(id & poolBits); sticky != "" {
				used[sticky] = true
				chain += " " + sticky
			}
			list := pools[id&poolBits]
			if !strings.Contains(chain, hashInName) {
				list = unordered(list)
			}
			m[fmt.Sprintf("%s %s: %s", family, d.frontends, to)+" by "+d.handlers] = fmt.Sprintf("%q: %s %s", t.names[d.frontends][to], chain, strings.Join(list, ", "))
		}
	}
	return used
}

var (
	// ownSets holds numbers and counters, which meaning leaves out or resolves.
	ownSets = regexp.MustCompile(`^((tcp|udp|sctp)-endpoints|sticky-.*|(internal-|own-)?handlers|(internal-)?service-(ips|nodeports)|connections|refused-packets|dropped-packets|hairpin-connections)$`)
	nftJump = regexp.MustCompile(`(?:goto|jump) ([\w-]+)`)
	// fixedChain matches the chains that always exist.
	fixedChain = regexp.MustCompile(`^chain (nat-|filter-|own-|services$|nodeports$|internal$|masquerading$|cluster-ips-check$)`)
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
			m[family+" "+name+": "+k] = v
		}
	}
	for block := range t.blocks {
		if fixedChain.MatchString(block) {
			used[strings.TrimPrefix(block, "chain ")] = true
		}
	}
	t.follow(used)
	for block, lines := range t.blocks {
		kind, name, _ := strings.Cut(block, " ")
		if kind == "flowtable" || kind == "chain" && used[name] {
			m[family+" "+block] = strings.Join(t.rules(lines), "; ")
		}
	}
}

// follow adds the chains that used chains lead to.
func (t *nftTable) follow(used map[string]bool) {
	for next := slices.Collect(maps.Keys(used)); len(next) != 0; next = next[1:] {
		for _, line := range t.blocks["chain "+next[0]] {
			for _, to := range nftJump.FindAllStringSubmatch(line, -1) {
				if !used[to[1]] {
					used[to[1]] = true
					next = append(next, to[1])
				}
			}
		}
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
