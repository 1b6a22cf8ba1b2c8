//go:build linux

package follow

import (
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Outcome is how a packet's way ended.
type Outcome uint8

// The outcomes.
const (
	// Lost: no chain dropped it, and it did not get to the end. Something that sends no
	// messages stopped it: iptables-legacy, routing, or a limit of the kernel's.
	Lost Outcome = iota
	// Sent: it left by an interface.
	Sent
	// Delivered: it was for the node itself.
	Delivered
	// Dropped: a rule or a chain's policy dropped it.
	Dropped
	// Queued: a rule handed it to a program (NFQUEUE), which has not returned it.
	Queued
)

// Unknown is Packet.In if it is not known whether and by which interface a packet came in.
const Unknown = -1

// Step is a rule that matched a packet, or the policy of a base chain.
type Step struct {
	Family uint8 // of the table, unix.NFPROTO_*
	Table  string
	Chain  string
	Rule   uint64 // its handle, 0 for the policy
}

// Packet is a packet and what became of it.
type Packet struct {
	// From and To are its addresses when it was first seen, and LastFrom and LastTo when
	// it was last seen.
	From, To         netip.AddrPort
	LastFrom, LastTo netip.AddrPort
	// In is the index of the interface it came in by, 0 if the node sent it, or Unknown.
	// Out is that of the interface it left by, 0 if it did not or that is not known.
	In, Out int
	// Steps are the rules that matched it, and the policy that dropped it if one did.
	// Those of the package's own table are not among them.
	Steps   []Step
	Outcome Outcome

	seen time.Time // when its last message came
	// looping reports that it was sent by the loopback interface and will come in again.
	looping bool
}

// Verdicts (include/uapi/linux/netfilter.h).
const (
	nfDrop  = 0
	nfQueue = 3
)

// idle is how long to wait for a packet's next message.
const idle = time.Second

// assembly puts packets together from messages.
type assembly struct {
	table    string // the package's own
	loopback uint32
	packets  map[uint32]*Packet // by trace ID
	done     func(*Packet)
}

// add takes a message that came at a time.
func (a *assembly) add(m message, now time.Time) {
	own := m.table == a.table
	p := a.packets[m.id]
	if own && m.rule != 0 && (p == nil || m.chain == chainOutput || !p.looping) {
		// The rule that marks packets matched: a new packet, if not the same again
		// after the loopback interface, of which some kernels give it a new ID.
		if p != nil {
			a.end(m.id, p, Lost) // the ID is used again
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
	switch verdict & 0xff { // above are an error or a queue's number
	case nfDrop:
		a.end(m.id, p, Dropped)
	case nfQueue:
		p.Outcome = Queued // unless more messages come
	default:
		p.Outcome = Lost
	}
}

// looped returns the packet that left by the loopback interface and comes in again with
// this message, nil if there is none.
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

// expire ends the packets of which no message came for a while.
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
