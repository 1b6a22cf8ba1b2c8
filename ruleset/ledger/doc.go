// Package ledger counts who uses what: which Services use an endpoint that a data
// plane installs once for all of them.
//
//	var l ledger.Ledger[tracker.Key, netip.AddrPort]
//	if l.Claim(service, endpoint) {
//		if err := install(endpoint); err != nil {
//			return err // the next Claim, whoever makes it, asks for it again
//		}
//		l.Installed(endpoint)
//	}
//	...
//	if l.Release(service, endpoint) {
//		if err := remove(endpoint); err != nil {
//			l.Claim(service, endpoint) // undo: to be released again with the retry
//			return err
//		}
//		l.Removed(endpoint)
//	}
//
// A claim is an owner's and an item's. To make it twice is to make it once, so
// retries do no harm, as they would to a plain counter. Beside the claims the ledger
// records whether each item is installed: after Claim or Release asked for a write,
// this is not known until the caller reports success by [Ledger.Installed] or
// [Ledger.Removed]. An install that failed for one Service is so asked for again by
// the next Service that needs the item.
//
// A new process calls Installed for every item that it finds in the data plane, and
// then claims what it needs. What is there is not installed again, and
// [Ledger.Unused] yields the items that no Service claimed.
package ledger
