//go:build linux

package takeover

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/netns"
	"github.com/go-proxier/proxier/examples/internal/node/nft"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Clients holds the clients that kube-proxy remembers for endpoints of Services with client
// affinity.
type Clients struct {
	// byName holds the time since the last connection of each client, by the name that
	// kube-proxy gives to an endpoint's memory.
	byName map[string]map[netip.Addr]time.Duration
}

// ReadClients reads what kube-proxy remembers in its modes nftables and iptables in the network
// namespace that ns is an open file of. It returns what it could read, with the errors of the rest.
func ReadClients(ctx context.Context, ns *os.File) (*Clients, error) {
	c := &Clients{byName: map[string]map[netip.Addr]time.Duration{}}
	n, err := netns.Open(ns)
	if err != nil {
		return c, err
	}
	defer n.Close()
	return c, errors.Join(c.readSets(ctx, ns), netns.Do(n, c.readRecent))
}

// Of returns the clients of an endpoint of a Service port, each with the time since its last
// connection. Two memories of the same endpoint add up. The result is the caller's.
func (c *Clients) Of(k tracker.Key, endpoint netip.AddrPort) map[netip.Addr]time.Duration {
	out := maps.Clone(c.byName[setName(k, endpoint)])
	for addr, age := range c.byName[iptables.EndpointChain(k, endpoint)] {
		if known, ok := out[addr]; out == nil {
			out = map[netip.Addr]time.Duration{addr: age}
		} else if !ok || age < known {
			out[addr] = age
		}
	}
	return out
}

// affinityPrefix begins the names of kube-proxy's sets of clients. Eight digits of a hash and
// a hyphen follow, and then what setName returns.
const (
	affinityPrefix = "affinity-"
	hashLength     = 9
)

// WriteRecent writes the clients that kube-proxy's nftables mode remembers for the endpoints of s
// to the lists of xt_recent that package iptables uses, in the network namespace that ns is an open
// file of. The rules of s must be in effect. Clients that have not connected within the affinity
// timeout are left out; the timeout of the others begins again. WriteRecent continues after an error.
func (c *Clients) WriteRecent(ns *os.File, s *ruleset.Port) error {
	if s.Spec.Affinity == 0 {
		return nil
	}
	lists := map[string][]netip.Addr{}
	for _, ep := range s.Selection.Reachable {
		for addr, age := range c.byName[setName(s.Key, ep.Addr)] {
			if age < s.Spec.Affinity {
				name := iptables.EndpointChain(s.Key, ep.Addr)
				lists[name] = append(lists[name], addr)
			}
		}
	}
	if len(lists) == 0 {
		return nil
	}
	n, err := netns.Open(ns)
	if err != nil {
		return err
	}
	defer n.Close()
	return netns.Do(n, func() error {
		var errs []error
		for name, clients := range lists {
			errs = append(errs, appendRecent(recentDir+"/"+name, clients))
		}
		return errors.Join(errs...)
	})
}

// appendRecent adds clients to a list of xt_recent. The kernel takes one from each open file.
func appendRecent(path string, clients []netip.Addr) error {
	for _, addr := range clients {
		if err := os.WriteFile(path, []byte("+"+addr.String()+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// setName returns the end of the name of the set of an endpoint's clients in kube-proxy's
// nftables mode, as in affinity-7TCSBJI4-default/web/tcp/http__10.1.0.2/8080.
func setName(k tracker.Key, endpoint netip.AddrPort) string {
	return fmt.Sprintf("%s/%s/%s/%s__%s/%d", k.Namespace, k.Name, strings.ToLower(string(k.Protocol)), k.Port,
		strings.ReplaceAll(endpoint.Addr().String(), ":", "."), endpoint.Port())
}

// readSets reads the sets of kube-proxy's nftables mode.
func (c *Clients) readSets(ctx context.Context, ns *os.File) error {
	conn, err := nft.Dial(ns)
	if err != nil {
		return err
	}
	defer conn.Close()
	for _, family := range families {
		timeouts := map[string]time.Duration{}
		sets, err := conn.Get(ctx, nft.Request{Type: unix.NFT_MSG_GETSET, Family: family, Flags: netlink.Dump,
			Attrs: []netlink.Attribute{nft.String(unix.NFTA_SET_TABLE, kubeProxyTable)}})
		for _, attrs := range sets {
			var name string
			var timeout time.Duration
			for typ, data := range nft.Attributes(attrs) {
				switch typ {
				case unix.NFTA_SET_NAME:
					name = unix.ByteSliceToString(data)
				case unix.NFTA_SET_TIMEOUT:
					timeout = milliseconds(data)
				}
			}
			if strings.HasPrefix(name, affinityPrefix) && len(name) > len(affinityPrefix)+hashLength {
				timeouts[name] = timeout
			}
		}
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, nft.ErrInterrupted) {
			return fmt.Errorf("cannot list kube-proxy's sets: %w", err)
		}
		for name, timeout := range timeouts {
			// New clients interrupt the dump. The loss of a client does no harm.
			if err := c.readSet(ctx, conn, family, name, timeout); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, nft.ErrInterrupted) {
				return fmt.Errorf("cannot read kube-proxy's set %s: %w", name, err)
			}
		}
	}
	return nil
}

func (c *Clients) readSet(ctx context.Context, conn *nft.Conn, family uint8, name string, timeout time.Duration) error {
	lists, err := conn.Get(ctx, nft.Request{Type: unix.NFT_MSG_GETSETELEM, Family: family, Flags: netlink.Dump, Attrs: []netlink.Attribute{
		nft.String(unix.NFTA_SET_ELEM_LIST_TABLE, kubeProxyTable), nft.String(unix.NFTA_SET_ELEM_LIST_SET, name),
	}})
	id := strings.ReplaceAll(name[len(affinityPrefix)+hashLength:], ":", ".")
	for _, attrs := range lists {
		for typ, list := range nft.Attributes(attrs) {
			if typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
				continue
			}
			for _, element := range nft.Attributes(list) {
				c.add(id, element, timeout)
			}
		}
	}
	return err
}

// add adds an element of a set whose elements expire after timeout.
func (c *Clients) add(id string, element []byte, timeout time.Duration) {
	var addr netip.Addr
	left := timeout
	for typ, data := range nft.Attributes(element) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			for typ, value := range nft.Attributes(data) {
				if typ == unix.NFTA_DATA_VALUE {
					addr, _ = netip.AddrFromSlice(value)
				}
			}
		case unix.NFTA_SET_ELEM_TIMEOUT:
			timeout = milliseconds(data)
		case unix.NFTA_SET_ELEM_EXPIRATION:
			left = milliseconds(data)
		}
	}
	if addr.IsValid() {
		c.put(id, addr, timeout-left)
	}
}

func (c *Clients) put(id string, addr netip.Addr, age time.Duration) {
	if c.byName[id] == nil {
		c.byName[id] = map[netip.Addr]time.Duration{}
	}
	c.byName[id][addr] = max(age, 0)
}

// milliseconds decodes the kernel's encoding of a time.
func milliseconds(data []byte) time.Duration {
	if len(data) != 8 {
		return 0
	}
	return time.Duration(min(binary.BigEndian.Uint64(data), math.MaxInt64/uint64(time.Millisecond))) * time.Millisecond
}

// recentDir has a file for each list of xt_recent in the calling thread's network namespace.
const recentDir = "/proc/thread-self/net/xt_recent"

// readRecent reads the lists of kube-proxy's mode iptables, which are named like the chains of
// the endpoints.
func (c *Clients) readRecent() error {
	entries, err := os.ReadDir(recentDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	now, hz, err := jiffies()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "KUBE-SEP-") {
			continue
		}
		f, err := os.Open(recentDir + "/" + e.Name())
		if err != nil {
			continue // its rules are gone
		}
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if addr, seen, ok := recentLine(lines.Text()); ok {
				c.put(e.Name(), addr, time.Duration(int64(now-seen))*time.Second/time.Duration(hz))
			}
		}
		f.Close()
	}
	return nil
}

// recentLine parses a line like "src=192.0.2.9 ttl: 64 last_seen: 4295470320 oldest_pkt: 1
// 4295470320". The time is in jiffies.
func recentLine(line string) (addr netip.Addr, seen uint64, ok bool) {
	f := strings.Fields(line)
	if len(f) < 5 || !strings.HasPrefix(f[0], "src=") || f[3] != "last_seen:" {
		return addr, 0, false
	}
	addr, err := netip.ParseAddr(f[0][len("src="):])
	seen, err2 := strconv.ParseUint(f[4], 10, 64)
	return addr, seen, err == nil && err2 == nil
}

// jiffies returns about the kernel's count of timer ticks, and their number per second. The
// count begins five minutes before 2^32 (INITIAL_JIFFIES of linux/jiffies.h).
func jiffies() (now uint64, hz int64, err error) {
	var tick, up unix.Timespec
	if err := errors.Join(unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &tick), unix.ClockGettime(unix.CLOCK_MONOTONIC, &up)); err != nil {
		return 0, 0, err
	}
	if tick.Nano() <= 0 {
		return 0, 0, errors.New("the length of a timer tick is unknown")
	}
	hz = int64(math.Round(float64(time.Second) / float64(tick.Nano())))
	return uint64(uint32(-300*hz)) + uint64(up.Nano()/int64(time.Second)*hz), hz, nil
}
