package iptables

import (
	"context"
	"io"
	"time"

	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/tracker"
)

// kernel is what a Backend needs of the system, in one network namespace. Only Watch may be called concurrently.
type kernel interface {
	// Programs finds the programs of a family.
	Programs(ctx context.Context, f tracker.Family) (programs, error)
	// Sysctl returns a sysctl's value, or "" if it cannot be read. Names are those of files
	// below /proc/sys.
	Sysctl(name string) string
	// SetSysctl sets a sysctl.
	SetSysctl(name, value string) error
	// Accounts opens the accounting objects.
	Accounts() (accounts, error)
	// Generation returns the generation of the tables: of nf_tables if nft is set, and of the families that use
	// ip_tables, without a program. ok is false if the kernel does not return it.
	Generation(ctx context.Context, nft bool, legacy []tracker.Family) (g generation, ok bool)
	// CountRules returns the number of rules of a chain in nf_tables, 0 if it does not exist. The error wraps
	// [nfnl.ErrInterrupted] if another process changed a table during the read.
	CountRules(ctx context.Context, f tracker.Family, t table, chain string) (int, error)
	// Watch calls check when a process may have changed nf_tables, and drifted with its
	// errors, as [Backend.Watch] documents for iptables-nft.
	Watch(ctx context.Context, interval time.Duration, check func(context.Context) error, drifted func(error)) error
	// Close releases the kernel's resources, but not those of accounts.
	Close() error
}

// programs runs iptables-restore and iptables-save of one family. Their errors are a
// [*CommandError] unless the program could not be run.
type programs interface {
	// NFT reports whether they program nf_tables, rather than ip_tables.
	NFT() bool
	// Restore applies an input of iptables-restore --noflush. After the input come options.
	Restore(ctx context.Context, input []byte, options ...string) error
	// Save writes the output of iptables-save about a table, or all tables if it is "".
	// The error wraps [iptool.ErrUnreadable] if iptables-save cannot print it.
	Save(ctx context.Context, table string, out io.Writer, options ...string) error
	// ReadContents returns what nf_tables has in a table that Save cannot print.
	ReadContents(ctx context.Context, table string) (iptool.Contents, error)
}

// accounts is a connection to the kernel's accounting objects (nfacct). Its methods may be
// called concurrently.
type accounts interface {
	// Add creates an object unless it exists.
	Add(name string) error
	// Packets returns an object's number of packets. ok is false if it does not exist.
	Packets(name string) (n uint64, ok bool, err error)
	// Delete deletes an object that no rule counts into, if it exists.
	Delete(name string) error
	Close() error
}

// generation is a cheap summary of the tables. Different values mean that the tables changed.
type generation struct {
	// nft is how many transactions were committed to nf_tables in the network namespace, 0 if no family uses it.
	nft uint32
	// legacy describes the tables of the families that use ip_tables: not a replacement by as many rules of the same
	// sizes.
	legacy string
}

// with calls f with c's defaults and the kernel, and closes the kernel afterwards.
func (c Config) with(f func(Config, kernel) error) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	k, err := openKernel(c)
	if err != nil {
		return err
	}
	defer k.Close()
	return f(c, k)
}

// each calls f for each family of the configuration until f fails.
func each(ctx context.Context, c Config, k kernel, f func(*family) error) error {
	for _, fam := range c.Families {
		p, err := k.Programs(ctx, fam)
		if err == nil {
			err = f(&family{Renderer: &Renderer{settings: &settings{family: fam}}, kernel: k, programs: p, log: c.Log, limit: firstLimit(p)})
		}
		if err != nil {
			return err
		}
	}
	return nil
}
