// Package driver is for data planes that are written entry by entry, without transactions. It has the order of
// writes, a record of the entries that exist, numbers for them, and their users. The author supplies functions
// that put and delete entries. A [Driver] calls them in an order in which no packet meets a frontend without
// its endpoints:
//
//	d, err := driver.New(driver.Tables[Locality, []Bucket, Flow]{
//		Endpoints: driver.Table[driver.Endpoint, Locality]{Installed: ..., Put: ..., Delete: ...},
//		Pools:     driver.Table[driver.Pool, []Bucket]{Installed: ..., Put: ..., Delete: ...},
//		Frontends: driver.Table[driver.Frontend, Flow]{Installed: ..., Put: ..., Delete: ...},
//		Endpoint:  func(s *ruleset.Port, ep *tracker.Endpoint) Locality { ... },
//		Pool:      func(s *ruleset.Port, t ruleset.Target) []Bucket { ... },
//		Frontend:  func(s *ruleset.Port, f *ruleset.Frontend) Flow { ... },
//	})
//	cursor := engine.Attach("switch", d)
//
// # Entries
//
// A Driver writes an entry only if its value differs, so an author need not interpret [ruleset.Field]. A value
// may depend on what earlier writes stored, for example on the number of a pool. A Driver calls Delete only
// after nothing refers to the entry. A table may take several entries in one call ([Table].PutAll and
// DeleteAll), or an old and a new value ([Table].Replace).
//
//   - [Slots] writes pools as numbered entries without gaps, for a BPF map.
//   - [Numbered] writes a table whose keys are numbers, such as the groups of a switch. [IDs] has
//     the numbers.
//   - [Ledger] counts the users of entries, for a data plane without a Driver.
//
// # Failures
//
// A failed write fails one Service, which is retried. The other Services are in effect, whether the delta is
// full or not. A data plane that cannot have a Service returns an error from [Tables].Refuse, and a full table
// returns one that wraps [ruleset.ErrRefused] from Put. If nothing of the Service was written, it then keeps
// what remains of its rules until it fits.
//
// # Restarts
//
// A full delta calls Installed for each table if it is the first one of a process or follows
// [ruleset.Cursor.Resync] or [ruleset.ErrNeedFull]. Entries that equal the wanted ones are not
// written, and entries that nothing needs are deleted. A restart without changes writes
// nothing. Tables without Installed are written completely.
//
// If a Service fails after a restart, a frontend that the earlier process wrote for it may stay, and may refer
// to any pool. So stale pools, endpoints and addresses of the earlier process stay until the Service is
// accepted or removed; frontends that no Service wants are deleted. As long as one Service keeps failing, every
// delta is full ([ruleset.Delta].Repeat) and compares all entries.
package driver
