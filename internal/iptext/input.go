// Package iptext models the text of iptables: the matches and targets of rules, the input of
// iptables-restore, and the output of iptables-save.
//
// A rule is written without "-A NAME" and exactly as iptables-save prints it, so that rules can
// be compared as strings.
package iptext

import (
	"bufio"
	"bytes"
	"io"
	"slices"
	"strings"
)

// Input is an input of iptables-restore --noflush. Each table is a Begin, lines, and a Commit.
// iptables-restore applies the lines of a table as a whole or not at all. The zero value is an
// empty input.
type Input struct{ text bytes.Buffer }

func (in *Input) line(parts ...string) {
	for _, p := range parts {
		in.text.WriteString(p)
	}
	in.text.WriteByte('\n')
}

// Begin begins a table.
func (in *Input) Begin(table string) { in.line("*", table) }

// Chain creates a chain, or empties it if it exists.
func (in *Input) Chain(name string) { in.line(":", name, " - [0:0]") }

// Append appends a rule to a chain.
func (in *Input) Append(chain, rule string) { in.line("-A ", chain, " ", rule) }

// Insert inserts a rule at the beginning of a chain.
func (in *Input) Insert(chain, rule string) { in.line(InsertCommand(chain, rule)) }

// Delete deletes the first of a chain's rules that equals rule.
func (in *Input) Delete(chain, rule string) { in.line(DeleteCommand(chain, rule)) }

// Expect makes the input fail unless a chain has the rule. It changes nothing.
func (in *Input) Expect(chain, rule string) { in.line("-C ", chain, " ", rule) }

// Remove removes a chain, which must be empty and which no rule may lead to.
func (in *Input) Remove(chain string) { in.line("-X ", chain) }

// Command adds a command of iptables, such as a result of [DeleteCommand].
func (in *Input) Command(c string) { in.line(c) }

// InsertCommand is the command of Insert.
func InsertCommand(chain, rule string) string { return "-I " + chain + " 1 " + rule }

// DeleteCommand is the command of Delete.
func DeleteCommand(chain, rule string) string { return "-D " + chain + " " + rule }

// Commit ends a table.
func (in *Input) Commit() { in.line("COMMIT") }

// Empty reports whether the input has no lines.
func (in *Input) Empty() bool { return in.text.Len() == 0 }

// Bytes returns the text. It is valid until the next line is added.
func (in *Input) Bytes() []byte { return in.text.Bytes() }

// String returns the text.
func (in *Input) String() string { return in.text.String() }

// Line is one line of the output of iptables-save: a chain, or a rule of a chain. The byte
// slices are valid until the next line is read.
type Line struct {
	// Table is the line's table.
	Table string
	// Chain is the name of the chain.
	Chain []byte
	// IsRule reports whether the line is a rule, and Rule is the rule. Otherwise the line
	// declares the chain.
	IsRule bool
	Rule   []byte
	// Counters is what iptables-save -c prints about a rule, such as "[3:180]", or nil.
	Counters []byte
}

// Scan reads the output of iptables-save and calls f with each line. It ignores unknown lines,
// and the rest after a line of more than 1 MiB.
func Scan(r io.Reader, f func(Line)) {
	in := bufio.NewScanner(r)
	in.Buffer(make([]byte, 64<<10), 1<<20)
	var l Line
	for in.Scan() {
		text := in.Bytes()
		var counters []byte
		if len(text) != 0 && text[0] == '[' {
			counters, text, _ = bytes.Cut(text, []byte(" "))
		}
		switch {
		case len(text) == 0:
		case text[0] == '*':
			l.Table = string(text[1:])
		case text[0] == ':':
			name, _, _ := bytes.Cut(text[1:], []byte(" "))
			f(Line{Table: l.Table, Chain: name})
		case bytes.HasPrefix(text, []byte("-A ")):
			name, rule, _ := bytes.Cut(text[3:], []byte(" "))
			if before, after, ok := bytes.Cut(rule, nfacctSaved); ok {
				rule = slices.Concat(before, nfacctWritten, after)
			}
			f(Line{Table: l.Table, Chain: name, IsRule: true, Rule: rule, Counters: counters})
		}
	}
}

// nfacctSaved is a match as iptables-save of version 1.8.9 prints it, with one blank too
// many. nfacctWritten is the match as it is written.
var nfacctSaved, nfacctWritten = []byte(" --nfacct-name  "), []byte(" --nfacct-name ")

// Saved holds the rules of each chain of each table, in order. A chain without rules has an
// entry.
type Saved map[string]map[string][]string

// Parse reads the output of iptables-save.
func Parse(text string) Saved {
	out := Saved{}
	Scan(strings.NewReader(text), func(l Line) {
		chains := out[l.Table]
		if chains == nil {
			chains = map[string][]string{}
			out[l.Table] = chains
		}
		rules := chains[string(l.Chain)]
		if l.IsRule {
			rules = append(rules, string(l.Rule))
		}
		chains[string(l.Chain)] = rules
	})
	return out
}
