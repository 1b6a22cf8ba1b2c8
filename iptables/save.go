//go:build linux

package iptables

import (
	"bufio"
	"bytes"
	"context"
	"hash/maphash"
	"io"
	"strings"
)

// kernelTable holds the kernel's state of one table.
type kernelTable struct {
	// chains holds a hash of the rules of each of our chains.
	chains map[string]*maphash.Hash
	// hooks is the rules in other chains that lead to ours, in order.
	hooks []hook
	// canary is the rules of our canary.
	canary []string
	// refuses reports that KUBE-SERVICES leads to KUBE-CLUSTER-IPS.
	refuses bool
	// setsBack reports that the guard of the loopback range has guardMark.
	setsBack bool
}

// hashChain returns the hash of a chain's rules.
func hashChain(seed maphash.Seed, rules []string) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	for _, r := range rules {
		h.WriteString(r)
		h.WriteByte('\n')
	}
	return h.Sum64()
}

// readKernel reads a table.
func (t tool) readKernel(ctx context.Context, tab table, seed maphash.Seed) (*kernelTable, error) {
	r, w := io.Pipe()
	done := make(chan *kernelTable, 1)
	go func() {
		k := parseSave(r, tab, seed)
		// The program must be able to write the rest, even if the parser gave up.
		_, _ = io.Copy(io.Discard, r)
		done <- k
	}()
	err := t.Save(ctx, tab.String(), w)
	w.Close()
	return <-done, err
}

// parseSave reads the output of iptables-save about a table. It ignores unknown lines.
func parseSave(r io.Reader, tab table, seed maphash.Seed) *kernelTable {
	k := &kernelTable{chains: map[string]*maphash.Hash{}}
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 64<<10), 1<<20)
	inTable := false
	var last string
	var lastHash *maphash.Hash
	for in.Scan() {
		line := in.Bytes()
		switch {
		case len(line) == 0:
		case line[0] == '*':
			inTable = string(line[1:]) == tab.String()
		case !inTable:
		case line[0] == ':':
			name, _, _ := strings.Cut(string(line[1:]), " ")
			if owned(tab, name) {
				h := &maphash.Hash{}
				h.SetSeed(seed)
				k.chains[name] = h
			}
		case bytes.HasPrefix(line, []byte("-A ")):
			name, rule, _ := bytes.Cut(line[3:], []byte(" "))
			rule = bytes.Replace(rule, nfacctSaved, nfacctWritten, 1)
			if string(name) != last {
				last = string(name)
				lastHash = k.chains[last]
			}
			if lastHash != nil {
				lastHash.Write(rule)
				lastHash.WriteByte('\n')
				switch {
				case last == chainCanary:
					k.canary = append(k.canary, string(rule))
				case last == chainServices && string(rule) == jump(chainClusterIPs):
					k.refuses = true
				}
				k.setsBack = k.setsBack || last == chainLocalnet && string(rule) == guardMark
			} else if to := target(rule); to != "" && owned(tab, to) {
				k.hooks = append(k.hooks, hook{tab, last, string(rule)})
			}
		}
	}
	return k
}

// nfacctSaved is a match as iptables-save of version 1.8.9 prints it, with one blank too
// many. nfacctWritten is the match as batches write it.
var nfacctSaved, nfacctWritten = []byte(" --nfacct-name  "), []byte(" --nfacct-name ")

// target returns the chain that a rule leads to, or its target, "" if it has
// none. A rule ends with the target and its options. A comment cannot be mistaken for it
// because it ends with a quote.
func target(rule []byte) string {
	for _, flag := range []string{"-j ", "-g "} {
		if i := bytes.LastIndex(rule, []byte(flag)); i >= 0 && (i == 0 || rule[i-1] == ' ') {
			to, _, _ := bytes.Cut(rule[i+len(flag):], []byte(" "))
			return string(to)
		}
	}
	return ""
}
