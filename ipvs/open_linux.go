package ipvs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/sysctl"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// netlinkTimeout bounds the wait for an answer of rtnetlink. Package moby/ipvs
// has no timeout; IPVS answers within the request.
const netlinkTimeout = 30 * time.Second

// lockWait bounds the wait for another program that holds the xtables lock.
const lockWait = 10 * time.Second

// system is the Linux kernel of one network namespace.
type system struct {
	*servers
	*ipsets
	*device
	ns     *netns.Namespace
	config Config
	// tools holds the iptables programs that were used.
	tools map[tracker.Family]*iptool.Tool
	// unreadable holds what was logged about tables that iptables-save cannot print.
	unreadable map[string]bool
}

var _ kernel = &system{}

// open opens what the purpose needs of the namespace that c names. c has its defaults.
func open(ctx context.Context, c Config, p purpose) (kernel, error) {
	s := &system{config: c, servers: &servers{}, tools: map[tracker.Family]*iptool.Tool{}, unreadable: map[string]bool{}}
	if err := s.open(ctx, p); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *system) open(ctx context.Context, p purpose) (err error) {
	if s.ns, err = netns.Open(s.config.NetNS); err != nil {
		return fmt.Errorf("ipvs: %w", err)
	}
	if p == toReadRules {
		return nil
	}
	if p != toSetParameters {
		if err := s.ns.Do(s.openOthers); err != nil {
			return fmt.Errorf("ipvs: %w", err)
		}
	}
	if p == toInspect {
		if err := s.deviceExists(); err != nil {
			return err
		}
	}
	err = s.ns.Do(func() (err error) { s.handle, err = openIPVS(); return err })
	if err != nil && !(p == toClean && errors.Is(err, errNoFamily)) {
		return unsupported(0, "IPVS (module ip_vs)", err)
	}
	if p == toServe {
		for _, f := range s.config.Families {
			if _, err := s.tool(ctx, f); errors.Is(err, iptool.ErrUnsupported) {
				return unsupported(f, "iptables", err)
			} else if err != nil {
				return fmt.Errorf("ipvs: %w", err)
			}
		}
	}
	return nil
}

// openOthers opens the sockets of ipset and rtnetlink in the calling thread's namespace.
func (s *system) openOthers() (err error) {
	if s.ipsets, err = dialIPSets(); err != nil {
		return err
	}
	s.device, err = dialDevice()
	return err
}

// deviceExists returns an error that wraps [dataplane.ErrNoRules] if the dummy device is missing. Opening the socket
// of IPVS would then load the module for nothing.
func (s *system) deviceExists() error {
	_, err := s.link()
	if missing := (netlink.LinkNotFoundError{}); errors.As(err, &missing) {
		return dataplane.ErrNoRules
	}
	if err != nil {
		return fmt.Errorf("ipvs: find device %s: %w", deviceName, err)
	}
	return nil
}

func (s *system) close() {
	if s.handle != nil {
		s.handle.Close()
	}
	if s.ipsets != nil {
		s.ipsets.close()
	}
	if s.device != nil {
		s.device.close()
	}
	if s.ns != nil {
		s.ns.Close()
	}
}

// tool finds the iptables programs of a family. Rules are written by programs because the
// kernel's interface for them is private to iptables.
func (s *system) tool(ctx context.Context, f tracker.Family) (*iptool.Tool, error) {
	if t := s.tools[f]; t != nil {
		return t, nil
	}
	t, err := iptool.Find(ctx, iptool.Config{Family: f, Flavor: string(s.config.IPTables), Namespace: s.ns, LockWait: lockWait})
	if err == nil {
		s.tools[f] = t
	}
	return t, err
}

func (s *system) savedRules(ctx context.Context, f tracker.Family) (iptext.Saved, error) {
	t, err := s.tool(ctx, f)
	if err != nil {
		return nil, err
	}
	var out strings.Builder
	if err := t.Save(ctx, "", &out); !errors.Is(err, iptool.ErrUnreadable) {
		return iptext.Parse(out.String()), err
	}
	out.Reset()
	for _, tab := range s.config.rules(f, &ruleset.Node{}).tables() {
		var one strings.Builder
		err := t.Save(ctx, tab.name, &one)
		text := one.String()
		if errors.Is(err, iptool.ErrUnreadable) {
			text, err = s.knownRules(ctx, f, tab, t)
		}
		if err != nil {
			return nil, err
		}
		out.WriteString(text)
	}
	return iptext.Parse(out.String()), nil
}

// knownRules returns the chains and the jumps of a table that iptables-save cannot print.
func (s *system) knownRules(ctx context.Context, f tracker.Family, tab table, t *iptool.Tool) (string, error) {
	c, err := t.ReadContents(ctx, tab.name)
	if err != nil {
		return "", err
	}
	if reason := fmt.Sprintf("%v table %s: %v", f, tab.name, c.Unreadable()); !s.unreadable[reason] {
		s.unreadable[reason] = true
		s.config.Log.Warn("ipvs: cannot read a table in which another program has rules: alterations of it are not noticed; keep such rules in a table of their own", "reason", reason)
	}
	var known []string
	for _, j := range tab.jumps {
		known = append(known, j.from+" "+j.rule)
	}
	return c.Text(tab.name, known, func(in []byte) error { return t.Restore(ctx, in) }), nil
}

func (s *system) restoreRules(ctx context.Context, f tracker.Family, input string) error {
	t, err := s.tool(ctx, f)
	if err != nil {
		return err
	}
	return t.Restore(ctx, []byte(input))
}

func (s *system) setParameters(list []parameter) error {
	return s.ns.Do(func() error {
		var errs []error
		for _, p := range list {
			if err := sysctl.Set(p.name, p.value); err != nil {
				errs = append(errs, fmt.Errorf("ipvs: %w", err))
			}
		}
		return errors.Join(errs...)
	})
}

func (s *system) release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

func (s *system) ipv6Disabled() (disabled bool, err error) {
	err = s.ns.Do(func() error {
		if _, err := os.Stat("/proc/thread-self/net/if_inet6"); errors.Is(err, fs.ErrNotExist) {
			disabled = true
			return nil
		}
		value, err := sysctl.Get("net/ipv6/conf/all/disable_ipv6")
		disabled = err == nil && value != "0"
		return nil
	})
	return disabled, err
}
