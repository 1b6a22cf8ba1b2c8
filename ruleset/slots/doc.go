// Package slots keeps the numbered entries of a pool without gaps. A BPF program, for
// example, finds the endpoints of a Service by a number below the pool's size.
//
//	var pool slots.Table[netip.AddrPort, uint16] // endpoint to weight
//	for ep := range change.RemovedFrom(ruleset.TargetCluster) {
//		pool.Delete(ep.Addr)
//	}
//	for ep := range change.UpsertedIn(ruleset.TargetCluster) {
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
// [Table.Set] and [Table.Delete] change the wanted contents and write nothing.
// [Table.Write] writes the differences. The caller then stores the new size, and
// [Table.Trim] deletes the entries at and above it. In this order every slot below the
// stored size holds an endpoint at any time.
//
// With package driver, Pools.Put calls [Table.Replace] and Write, Frontend reads [Table.Len],
// and Trim calls Trim.
//
// The number of writes is proportional to the number of keys set and deleted. A key
// that replaces another one takes its slot and costs one write. If more keys are
// deleted than added, the keys in the last slots move into the gaps.
//
// # Failures and restarts
//
// A failed write may have taken effect. The table remembers the slot until a write of it
// succeeds. A caller only has to call Write again, whatever was set and deleted since.
//
// A new process passes the entries that it finds in the data plane to [Table.Adopt].
// Keys keep their slots, and only differences are written.
package slots
