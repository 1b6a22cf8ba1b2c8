// Package driver applies deltas to a data plane that is written entry by entry, without
// transactions. The author supplies functions that put and delete entries. A [Driver] calls
// them in the order in which no packet meets a frontend without its endpoints:
//
//	d := driver.New(driver.Plane[[]Bucket, Flow]{
//		Endpoints: driver.Table[driver.Endpoint, struct{}]{Installed: ..., Put: ..., Delete: ...},
//		Pools:     driver.Table[driver.Pool, []Bucket]{Installed: ..., Put: ..., Delete: ...},
//		Frontends: driver.Table[driver.Frontend, Flow]{Installed: ..., Put: ..., Delete: ...},
//		Pool:      func(s *ruleset.Service, t ruleset.Target) []Bucket { ... },
//		Frontend:  func(s *ruleset.Service, f *ruleset.Frontend) Flow { ... },
//	})
//	cursor := engine.Attach("switch", d)
//
// A Driver writes an entry only if its value differs from the previous one, so an author need
// not interpret [ruleset.Field]. It calls Delete only after nothing refers to the entry. A
// failed write fails one Service, which is retried; a failure in a full delta causes another
// full delta.
//
// While a Service is refused each time, every delta is therefore full and compares all entries. The
// other Services are served, and frontends that they give up are deleted. All other entries that
// nothing needs, such as those that an earlier process left, stay until the Service is accepted or
// removed, because its earlier frontends may refer to them.
//
// A full delta, which is the first one of a process, calls Installed for each table. Entries
// that equal the wanted ones are not written, and entries that nothing needs are deleted. A
// restart without changes writes nothing.
//
// A data plane with transactions does not need this package: it may write in any order.
package driver
