package ruleset

import (
	"maps"
	"net/netip"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// Snapshot is the whole ruleset at one time. It must not be changed after its first use; it is then safe for
// concurrent use. A Snapshot that no [Engine] made needs Ports and Node.
type Snapshot struct {
	// Gen is the generation of the ruleset, as in [Delta].
	Gen uint64
	// Node is the node, never nil in a snapshot of an [Engine].
	Node *Node
	// Ports holds every compiled port, in no particular order.
	Ports []*Port
	// Refused holds the Service ports that have no rules because of the Budget, in no particular order, with the
	// reason in LeftOut.
	Refused []*Port

	once sync.Once
	// at finds frontends. clusterIPs holds the cluster IPs in use.
	at         map[l4Key]found
	clusterIPs map[netip.Addr]*Port
	// leftOut finds the frontends that the Budget leaves out.
	leftOut map[l4Key]found

	onceNames sync.Once
	names     map[types.NamespacedName][]*Port
}

type found struct {
	service  *Port
	frontend *Frontend
}

// Delta returns the ruleset as a full delta, in the order of the keys, for a renderer.
func (s *Snapshot) Delta() *Delta {
	d := &Delta{Full: true, Gen: s.Gen, Node: s.Node, Changes: make([]Change, len(s.Ports))}
	for i, p := range s.Ports {
		d.Changes[i] = Change{Key: p.Key, New: p, Fields: FieldAll}
	}
	slices.SortFunc(d.Changes, func(a, b Change) int { return a.Key.Compare(b.Key) })
	return d
}

// DeltaFrom returns the changes from old to s, in the order of the keys, for a renderer. If old is of another Engine,
// a Port in the result has the ID of its key in old, or one that old does not have.
func (s *Snapshot) DeltaFrom(old *Snapshot) *Delta {
	before, last := make(map[tracker.Key]*Port, len(old.Ports)), uint32(0)
	for _, p := range slices.Concat(old.Ports, s.Ports) {
		last = max(last, p.ID)
	}
	taken := make(map[uint32]bool, len(old.Ports))
	for _, p := range old.Ports {
		before[p.Key], taken[p.ID] = p, true
	}
	d := &Delta{Gen: s.Gen, Node: s.Node, OldNode: old.Node}
	for _, p := range s.Ports {
		was, id := before[p.Key], p.ID
		delete(before, p.Key)
		switch {
		case was != nil:
			id = was.ID
		case taken[id]:
			last++
			id = last
		}
		if id != p.ID {
			q := *p
			q.ID = id
			p = &q
		}
		if f := diff(was, p); f != 0 {
			d.Changes = append(d.Changes, Change{Key: p.Key, Old: was, New: p, Fields: f})
		}
	}
	for key, was := range before {
		d.Changes = append(d.Changes, Change{Key: key, Old: was, Fields: FieldAll})
	}
	slices.SortFunc(d.Changes, func(a, b Change) int { return a.Key.Compare(b.Key) })
	return d
}

// Snapshot brings the ruleset up to date with the tracker, as [Cursor.Sync] does, and returns it. It is empty while
// the tracker is not Synced. It costs a pointer per Service. The first [Snapshot.Lookup] or [Snapshot.Trace] builds
// an index of some hundred bytes per frontend. Later calls take constant time.
func (e *Engine) Snapshot() *Snapshot {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pull()
	s := &Snapshot{Gen: e.gen, Node: e.node, Ports: make([]*Port, 0, e.ports)}
	for id := range e.slots {
		if e.slots[id].live {
			s.Ports = append(s.Ports, e.slots[id].svc)
		}
	}
	s.Refused = slices.AppendSeq(s.Refused, maps.Values(e.admission.refused))
	return s
}

// Lookup returns the Service at an address, port and protocol, and its frontend, or nil. An IPv4-mapped IPv6 address
// means the IPv4 address. A NodePort is found at the unspecified address of its family; see [Snapshot.Trace].
func (s *Snapshot) Lookup(to netip.AddrPort, p v1.Protocol) (*Port, *Frontend) {
	if !to.IsValid() {
		return nil, nil
	}
	return s.lookup(l4KeyAt(canonical(to.Addr()), to.Port(), p))
}

func (s *Snapshot) lookup(at l4Key) (*Port, *Frontend) {
	s.index()
	f := s.at[at]
	return f.service, f.frontend
}

// LookupLeftOut is like Lookup for frontends that the Budget leaves out: see [LeftOut].
func (s *Snapshot) LookupLeftOut(to netip.AddrPort, p v1.Protocol) (*Port, *Frontend) {
	if s.index(); !to.IsValid() {
		return nil, nil
	}
	f := s.leftOut[l4KeyAt(canonical(to.Addr()), to.Port(), p)]
	return f.service, f.frontend
}

func (s *Snapshot) index() {
	s.once.Do(func() {
		s.at = make(map[l4Key]found, 2*len(s.Ports))
		s.leftOut = map[l4Key]found{}
		s.clusterIPs = make(map[netip.Addr]*Port, len(s.Ports))
		for _, svc := range s.Ports {
			for i := range svc.Frontends {
				f := &svc.Frontends[i]
				s.at[l4KeyOf(svc, f)] = found{svc, f}
				if f.Kind == KindClusterIP {
					s.clusterIPs[f.Addr] = svc
				}
			}
		}
		for _, svc := range s.Refused {
			for i := range svc.Frontends {
				s.leftOut[l4KeyOf(svc, &svc.Frontends[i])] = found{svc, &svc.Frontends[i]}
			}
		}
	})
}

// canonical returns a in the form used everywhere in the ruleset: unmapped and
// without a zone.
func canonical(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }
