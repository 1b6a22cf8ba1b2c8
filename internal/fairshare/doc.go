// Package fairshare bounds what strangers may use up together, such as open connections. If there is
// no room for a new entry, another one must end: the oldest of the holder that has most. So a holder
// that floods the table ends its own entries and not those of others.
//
//	open := fairshare.New[net.Conn](512)
//	...
//	victim, full := open.Add(conn, fairshare.Holder{Namespace: "shop", Service: "web", Client: client})
//	if full {
//		victim.Close()
//	}
package fairshare
