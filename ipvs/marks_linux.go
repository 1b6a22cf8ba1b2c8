package ipvs

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nft"
)

func (c *ipsets) restoreMarks(wanted bool) error {
	b := &nft.Batch{}
	b.Reset()
	if err := b.Script(strings.Join(marksInput(wanted), "\n")); err != nil {
		panic(err) // the text is a constant
	}
	err := c.conn.Commit(&b.Batch)
	switch {
	case errors.Is(err, unix.EPERM):
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOENT), errors.Is(err, unix.EINVAL):
		err = errors.Join(errors.ErrUnsupported, err)
	}
	if err != nil {
		return fmt.Errorf("write table %s: %w", marksTable, err)
	}
	return nil
}

func (c *ipsets) marksRestored() error {
	rules, err := (&nft.Conn{Conn: c.conn}).Rules(marksTable, unix.NFPROTO_INET)
	if err != nil {
		return fmt.Errorf("read rules of table %s: %w", marksTable, err)
	}
	count := map[string]int{}
	for _, r := range rules {
		count[r.Chain]++
	}
	for chain := range markPriorities {
		if count[chain] != 1 {
			return fmt.Errorf("chain %s of table %s has %d rules", chain, marksTable, count[chain])
		}
	}
	return nil
}
