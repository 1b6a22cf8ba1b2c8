package nfnl

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Commit finishes the batch, sends it, and returns once the kernel has committed or refused
// all of it. If the kernel refused it, the error is an [*Error]. An empty batch is not sent.
func (c *Conn) Commit(b *Batch) error {
	if b.Empty() && !c.Closed() {
		return nil
	}
	last := b.seq - 1
	c.unread = true
	if err := c.Send(b.Finish()); err != nil {
		return err
	}
	// The kernel has processed the batch, and its answers are waiting. Commit reads all
	// of them, so that the next batch does not get an old answer, even if the socket
	// could not hold all refusals.
	var failed *Error
	acked, lost := false, false
	for {
		answers, err := c.Receive(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.unread = false
			if failed != nil {
				return failed
			}
			if lost || !acked {
				return fmt.Errorf("netlink: the kernel did not acknowledge the transaction: %w", unix.ENOBUFS)
			}
			return nil
		case errors.Is(err, unix.ENOBUFS):
			lost = true
			continue
		case err != nil:
			return err
		}
		for len(answers) > 0 {
			var m Message
			if m, answers, err = Next(answers); err != nil {
				return err
			}
			if !m.Acknowledges() {
				continue
			}
			err := m.Err()
			var refusal *Error
			switch {
			case err == nil && m.Seq == last:
				acked = true
			case errors.As(err, &refusal) && failed == nil:
				refusal.What = b.what(m.Seq)
				failed = refusal
			}
		}
	}
}
