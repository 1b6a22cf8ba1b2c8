// Package slots keeps the numbered entries of a pool without gaps: the endpoints of
// a Service as a BPF program looks them up, by a number below the pool's size.
//
//	var pool slots.Table[netip.AddrPort, uint16] // endpoint to weight
//	for ep := range change.RemovedFrom(ruleset.ToCluster) {
//		pool.Delete(ep.Addr)
//	}
//	for ep := range change.UpsertedIn(ruleset.ToCluster) {
//		pool.Set(ep.Addr, ep.Weight)
//	}
//	err := pool.Write(func(slot int, addr netip.AddrPort, weight uint16) error {
//		return endpoints.Put(slot, addr, weight) // the data plane's map
//	})
//	...
//	err = frontends.Put(vip, pool.Len()) // the number of slots to choose from
//	...
//	err = pool.Trim(func(slot int) error { return endpoints.Delete(slot) })
//
// [Table.Set] and [Table.Delete] change what the table must hold and write nothing.
// [Table.Write] brings in what differs, then the caller puts the new size into
// effect, and [Table.Trim] deletes the entries at and above it. In this order every
// slot below the size in effect holds an endpoint at any moment.
//
// The number of writes is proportional to the number of keys set and deleted. A key
// that takes another's place takes its slot and costs one write. Where more keys go
// than come, the last slots' keys move into the gaps.
//
// # Failures and restarts
//
// A write that failed may have taken effect. The table remembers its slot until a
// write of that slot succeeds, so a caller only has to call Write again, whatever was
// set and deleted since.
//
// A new process hands in what it finds in the data plane with [Table.Adopt]. Keys keep
// their slots, and only what differs is written.
package slots
