// Package complaint bounds what users of the API can write to logs and events through their
// objects: the length of each value and each message, how often a message is repeated, and
// the rate of messages.
//
// A [Log] passes a message about an object once, as long as the message stays the same. TENANTS.md has the
// rates. The next message that a Log passes has the number of those that it suppressed. A Log remembers at most about
// 8,000 messages and as many namespaces, each for at most two hours.
//
// [Value], [Name], [Text] and [Long] cut what a message contains, and [Printable] makes it one line. A [Bucket] bounds the rate of
// lines that are not about one object.
package complaint
