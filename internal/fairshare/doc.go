// Package fairshare bounds what strangers may use up together, such as open connections. If there is
// no room for a new entry, another one must end: the oldest of the holder that has most. So a holder
// that floods the table ends its own entries and not those of others.
package fairshare
