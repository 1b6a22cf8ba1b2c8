// Package driver is for data planes that are written entry by entry, without transactions. The author names the
// tables in an order in which each refers to earlier ones only, and which entries a Service wants. A [Driver]
// writes them in an order in which no packet meets a frontend without its endpoints:
//
//	endpoints := &driver.Table[driver.Endpoint, struct{}]{Installed: ..., Put: ..., Delete: ...}
//	pools := &driver.Table[driver.Pool, []Bucket]{Installed: ..., Put: ..., Delete: ...}
//	frontends := &driver.Table[driver.Frontend, Flow]{Installed: ..., Put: ..., Delete: ...}
//	d, err := driver.New(driver.Plane{
//		Tables: []driver.Ordered{endpoints, pools, frontends},
//		Want: func(s *ruleset.Port) {
//			for pool, eps := range driver.Pools(s, false) {
//				... endpoints.Want(driver.EndpointOf(s, ep), struct{}{}) ...
//				pools.Want(pool, buckets)
//			}
//			for at, f := range driver.Frontends(s) {
//				frontends.Want(at, Flow{f.Target, ...})
//			}
//		},
//	})
//	cursor := engine.Attach("switch", d)
//
// The Driver adds or replaces entries from the first table to the last, and deletes them from the last to the first. It
// writes an entry only if its value differs, so an author need not interpret [ruleset.Field].
//
//   - [Slots] is a table of pools as numbered entries without gaps, for a BPF map.
//   - [Numbered] is a table whose keys are numbers, such as the groups of a switch.
//   - [Ledger] counts the users of entries, and [IDs] has numbers, for a data plane without a Driver.
//
// # Failures and restarts
//
// A failed write fails one Service, which is retried; the others are in effect. If a Service was to take over a frontend
// and fails, the earlier owner's entries stay until it succeeds.
//
// In a full delta, entries that Installed yields are not written if they equal the wanted ones, and deleted if no Service
// wants them. Tables without Installed are written completely. While a Service fails after a restart, a frontend of the
// earlier process may refer to any pool, so unwanted entries of that process stay in all tables but the last one.
package driver
