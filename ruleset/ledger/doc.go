// Package ledger records which Services use an endpoint that a data plane installs once
// for all of them.
//
//	var l ledger.Ledger[tracker.Key, netip.AddrPort]
//	if l.Claim(service, endpoint) {
//		if err := install(endpoint); err != nil {
//			return err // the next Claim by any Service requests it again
//		}
//		l.Installed(endpoint)
//	}
//	...
//	if l.Release(service, endpoint) {
//		if err := remove(endpoint); err != nil {
//			l.Claim(service, endpoint) // undo: the retry releases it again
//			return err
//		}
//		l.Removed(endpoint)
//	}
//
// A claim belongs to one owner and one item. Repeating it has no effect, so retries do no
// harm, as they would with a plain counter. The ledger also records whether each item is
// installed. After Claim or Release requested a write, the state is unknown until the
// caller reports success with [Ledger.Installed] or [Ledger.Removed]. If an install fails
// for one Service, the next Service that needs the item requests it again.
//
// A new process calls Installed for every item that it finds in the data plane, and then
// claims what it needs. Items that exist are not installed again, and [Ledger.Unused]
// yields the items that no Service claimed.
package ledger
