package complaint

import "time"

// Bucket is a token bucket, full at first. It is not safe for concurrent use.
type Bucket struct {
	// Burst is the number of events in a row that the bucket allows. It must be positive.
	Burst int
	// Every is the time in which it allows another one. It must be positive.
	Every time.Duration

	used    int
	at      time.Time // when used was last correct
	refused int
}

// Take reports whether an event is allowed. If so, suppressed is the number of events since
// the last allowed one that were not.
func (b *Bucket) Take(now time.Time) (suppressed int, ok bool) {
	if !b.has(now) {
		b.refused++
		return 0, false
	}
	b.take()
	suppressed, b.refused = b.refused, 0
	return suppressed, true
}

// has reports whether there is a token.
func (b *Bucket) has(now time.Time) bool {
	if n := int64(now.Sub(b.at) / b.Every); n >= int64(b.used) {
		b.used, b.at = 0, now
	} else if n > 0 {
		b.used -= int(n)
		b.at = b.at.Add(time.Duration(n) * b.Every)
	}
	return b.used < b.Burst
}

// take takes a token that has reported.
func (b *Bucket) take() { b.used++ }
