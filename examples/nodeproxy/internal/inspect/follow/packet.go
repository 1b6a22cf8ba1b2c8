//go:build linux

package follow

import (
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Outcome is what happened to a packet at the end.
type Outcome uint8

// The outcomes.
const (
	// Lost means that the packet was stopped by a part of the kernel that sends no trace
	// messages: iptables-legacy, routing, or a limit.
	Lost Outcome = iota
	// Sent means that the packet left by an interface.
	Sent
	// Delivered means that the packet was for the node itself.
	Delivered
	// Dropped means that a rule or a chain's policy dropped the packet.
	Dropped
	// Queued means that a rule queued the packet to a program (NFQUEUE), which has not
	// returned it.
	Queued
)

// Unknown is the value of Packet.In if the incoming interface is not known.
const Unknown = -1

// Step is a rule that matched a packet, or the policy of a base chain.
type Step struct {
	Family uint8 // of the table, unix.NFPROTO_*
	Table  string
	Chain  string
	Rule   uint64 // the rule's handle, 0 for the policy
}

// Packet is a packet and its outcome.
type Packet struct {
	// From and To are the addresses in the packet's first message, and LastFrom and LastTo
	// in its last one.
	From, To         netip.AddrPort
	LastFrom, LastTo netip.AddrPort
	// In is the index of the interface by which the packet came in, 0 if the node sent it,
	// or Unknown. Out is the index of the interface by which it left, or 0 if it did not
	// leave or the interface is not known.
	In, Out int
	// Steps are the rules that matched the packet, and the policy that dropped it, if any.
	// They leave out the package's own table.
	Steps   []Step
	Outcome Outcome

	seen time.Time // when the last message arrived
	// looping reports that the packet left by the loopback interface and will come in again.
	looping bool
}

// Verdicts (include/uapi/linux/netfilter.h).
const (
	nfDrop  = 0
	nfQueue = 3
)

// idle is how long to wait for a packet's next message.
const idle = time.Second

// assembly assembles packets from messages.
type assembly struct {
	table    string // the package's own table
	loopback uint32
	packets  map[uint32]*Packet // by trace ID
	done     func(*Packet)
}

// add adds a message that arrived at now.
func (a *assembly) add(m message, now time.Time) {
	own := m.table == a.table
	p := a.packets[m.id]
	if own && m.rule != 0 && (p == nil || m.chain == chainOutput || !p.looping) {
		// The rule that marks packets matched. The packet is new, unless it came in again
		// by the loopback interface, after which some kernels give it a new ID.
		if p != nil {
			a.end(m.id, p, Lost) // the kernel reuses the ID
		}
		if p = a.looped(m); p == nil {
			p = &Packet{From: m.from, To: m.to, LastFrom: m.from, LastTo: m.to, In: int(m.in)}
			a.packets[m.id] = p
		}
	}
	if p == nil {
		if p = a.looped(m); p == nil {
			return
		}
	}
	p.seen = now
	headers := m.from.IsValid() // the first message of a base chain has them
	if headers {
		p.LastFrom, p.LastTo = m.from, m.to
	}
	if own {
		if !headers {
			return
		}
		switch m.chain {
		case chainPostrouting:
			p.Out = int(m.out)
			if p.looping = m.out == a.loopback; !p.looping {
				a.end(m.id, p, Sent)
			}
		case chainInput:
			a.end(m.id, p, Delivered)
		}
		return
	}
	step := Step{Family: m.family, Table: m.table, Chain: m.chain, Rule: m.rule}
	verdict := m.verdict
	if m.kind == unix.NFT_TRACETYPE_POLICY {
		verdict, step.Rule = int32(m.policy), 0
		if verdict != nfDrop {
			return
		}
	} else if m.rule == 0 {
		return // the end of a chain
	}
	p.Steps = append(p.Steps, step)
	switch verdict & 0xff { // the upper bits are an error or a queue's number
	case nfDrop:
		a.end(m.id, p, Dropped)
	case nfQueue:
		p.Outcome = Queued // unless more messages come
	default:
		p.Outcome = Lost
	}
}

// looped returns the packet that left by the loopback interface and comes in again with
// this message, or nil if no packet matches.
func (a *assembly) looped(m message) *Packet {
	if m.in != a.loopback {
		return nil
	}
	for id, p := range a.packets {
		if p.looping && p.LastFrom == m.from && p.LastTo == m.to {
			delete(a.packets, id)
			a.packets[m.id] = p
			return p
		}
	}
	return nil
}

// expire ends the packets without a message for the duration after.
func (a *assembly) expire(now time.Time, after time.Duration) {
	var old []uint32
	for id, p := range a.packets {
		if now.Sub(p.seen) >= after {
			old = append(old, id)
		}
	}
	slices.SortFunc(old, func(x, y uint32) int { return a.packets[x].seen.Compare(a.packets[y].seen) })
	for _, id := range old {
		a.end(id, a.packets[id], a.packets[id].Outcome)
	}
}

func (a *assembly) end(id uint32, p *Packet, o Outcome) {
	delete(a.packets, id)
	p.Outcome = o
	a.done(p)
}
