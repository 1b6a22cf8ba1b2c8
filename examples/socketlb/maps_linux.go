package socketlb

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The keys and values of the maps, which programs.c declares, too. Their fields must have no gaps.

// serviceID identifies a Service port in the maps. It is the first bytes of the SHA-256 of
// the port's key, so that it is the same after a restart.
type serviceID uint64

func idOf(k tracker.Key) serviceID {
	sum := sha256.Sum256([]byte(k.String()))
	return serviceID(binary.NativeEndian.Uint64(sum[:]))
}

// endpoint is an address and port in network byte order. An IPv4 address is IPv4-mapped.
// Protocol is 0 but in a frontendKey.
type endpoint struct {
	Addr     [16]byte
	Port     [2]byte
	Protocol uint16
}

// frontendKey is a Service's address and port. The address of a NodePort is
// [netip.IPv6Unspecified] or ::ffff:0.0.0.0. Protocol is IPPROTO_UDP, or 0 for TCP.
type frontendKey = endpoint

func endpointOf(a netip.AddrPort) endpoint {
	e := endpoint{Addr: a.Addr().As16()}
	binary.BigEndian.PutUint16(e.Port[:], a.Port())
	return e
}

// String returns the address and port as text, such as "10.0.0.1:80".
func (e endpoint) String() string {
	return netip.AddrPortFrom(netip.AddrFrom16(e.Addr).Unmap(), binary.BigEndian.Uint16(e.Port[:])).String()
}

// anyAddr returns the address of the key of a NodePort.
func anyAddr(v4 bool) netip.Addr {
	if v4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// keyOf returns the key of a frontend of the Service port k.
func keyOf(f *ruleset.Frontend, k tracker.Key) frontendKey {
	addr := f.Addr
	if f.Kind == ruleset.KindNodePort {
		addr = anyAddr(k.Family == tracker.IPv4)
	}
	out := endpointOf(netip.AddrPortFrom(addr, f.Port))
	if k.Protocol == v1.ProtocolUDP {
		out.Protocol = unix.IPPROTO_UDP
	}
	return out
}

// frontendValue determines the endpoints of connections to a frontend.
type frontendValue struct {
	Service serviceID
	// Affinity is the timeout of client affinity in nanoseconds, or 0.
	Affinity uint64
	// Node is for processes in the node's own network namespace, Pods for others.
	Node, Pods pool
}

// pool holds the slots from which a connection's endpoint is drawn. A pool of size 0 leaves
// the connection alone.
type pool struct {
	Target, Size uint32
}

// slotKey is a slot of a pool, numbered from 0.
type slotKey struct {
	Service      serviceID
	Target, Slot uint32
}

// memberKey is an endpoint of a pool of a Service with affinity. With target flowMember it is an
// endpoint that keeps the datagrams of a UDP Service that it already gets.
type memberKey struct {
	Service  serviceID
	Target   uint32
	Endpoint endpoint
}

// clientKey is a client of a Service with affinity: a network namespace, by its cookie.
type clientKey struct {
	Service serviceID
	NetNS   uint64
}

// client holds the time of a client's last connection, in nanoseconds of the monotonic clock,
// and its endpoint.
type client struct {
	Seen     uint64
	Endpoint endpoint
	Pad      uint32
}

// peer is the address that a process connected its socket to, and the endpoint.
type peer struct {
	Service, Endpoint endpoint
}

// recentPeer is the peer of one socket. Overflow is the number of sockets that found it in use, and
// whose peers are in the map peers.
type recentPeer struct {
	Cookie, Overflow uint64
	Peer             peer
	Pad              uint64
}

// flowMember is the Target of a memberKey that is not one of a pool.
const flowMember = 0

// flowKey identifies one of the Services to which an unconnected socket sends datagrams. Number counts
// them from 0.
type flowKey struct {
	Cookie      uint64
	Number, Pad uint32
}

const (
	// namespaceShare is the part of the flows that one network namespace may have.
	namespaceShare = 16
	// maxNamespaces is the maximum number of network namespaces with a count of their own.
	maxNamespaces = 1 << 16
)

// address holds the properties of an address of the node. NodePorts is 1 if NodePorts answer
// there, and Source is 1 if a socket that is bound to it needs no masquerading. Family is the
// third word of the frontendKey of a NodePort.
type address struct {
	NodePorts, Source uint32
	Family            [4]byte
}

// connections holds the numbers of translated connections of processes in the node's own network namespace and of
// others.
type connections struct {
	Node, Pods uint64
}

// bpfMaps holds the maps by their names in programs.c, which are those of their files.
type bpfMaps map[string]*ebpf.Map

// entries returns the number of entries that each map may have.
func (c *Config) entries() map[string]uint32 {
	return map[string]uint32{
		"frontends": maxFrontends,          // frontendKey -> frontendValue
		"endpoints": uint32(c.endpoints),   // slotKey -> endpoint
		"members":   uint32(c.endpoints),   // memberKey -> 1
		"addresses": maxAddresses,          // [16]byte -> address
		"clients":   uint32(c.clients),     // clientKey -> client
		"recent":    c.recentSize(),        // cookie of a socket modulo the size -> recentPeer
		"peers":     uint32(c.connections), // cookie of a socket that is not in recent -> peer
		"flows":     uint32(c.connections), // flowKey -> peer
		// The number of flows of each network namespace, by a hash of its cookie. The size depends on that
		// of flows: if flows must be replaced, so must the numbers.
		"namespaces":    uint32(maxNamespaces + c.connections),
		connectionsFile: maxFrontends, // serviceID -> connections
	}
}

// maxRecent is the most entries of the map recent. A CPU numbers its sockets in sequence
// (include/linux/cookie.h), so a new socket's entry is free unless an open socket has the
// same number modulo 4,096. These 256 KiB stay in a processor's cache; a map of all peers does not, and a lookup in it
// takes half a microsecond.
const maxRecent = 4096

// recentSize returns the number of entries of the map recent: a power of two, and no more than
// the connections for which the map peers has room.
func (c *Config) recentSize() uint32 {
	return 1 << (bits.Len(uint(min(c.connections, maxRecent))) - 1)
}

// open opens the maps that an earlier process left. It creates maps that are missing or have
// another layout or size, without a file yet.
func (m bpfMaps) open(c *Config, specs map[string]*ebpf.MapSpec) error {
	for name, entries := range c.entries() {
		spec := specs[name]
		spec.Name, spec.MaxEntries = "proxier_"+name[:min(len(name), 7)], entries
		found, err := ebpf.LoadPinnedMap(filepath.Join(c.Dir, name), nil)
		if err == nil && spec.Compatible(found) == nil {
			m[name] = found
			continue
		}
		if err == nil {
			found.Close()
			c.Log.Warn("socketlb: replacing a map that has another layout or size", "map", name)
		} else if !errors.Is(err, fs.ErrNotExist) {
			c.Log.Warn("socketlb: replacing a map that cannot be opened", "map", name, "error", err)
		}
		if m[name], err = ebpf.NewMap(spec); err != nil {
			return err
		}
	}
	return nil
}

// pin makes each map's file refer to the map that is in use. It deletes files of maps that only
// another version has.
func (m bpfMaps) pin(c *Config) error {
	if err := os.Mkdir(c.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("socketlb: cannot create the folder of the maps: %w", err)
	}
	for name, want := range m {
		path := filepath.Join(c.Dir, name)
		if pinned(path, want) {
			continue
		}
		// Without Unpin, Pin does nothing for a map that had this file before.
		if err := errors.Join(want.Unpin(), replaceFile(path, want.Pin)); err != nil {
			return fmt.Errorf("socketlb: cannot pin map %s: %w", name, err)
		}
	}
	for _, name := range files(c) {
		if m[name] != nil || slices.Contains(hookNames, name) {
			continue
		}
		if err := os.Remove(filepath.Join(c.Dir, name)); err != nil {
			return fmt.Errorf("socketlb: cannot delete the file of a map: %w", err)
		}
	}
	return nil
}

// pinned reports whether the file at path refers to the map want.
func pinned(path string, want *ebpf.Map) bool {
	found, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return false
	}
	defer found.Close()
	id := mapID(want)
	return id != 0 && mapID(found) == id
}

// mapID returns the kernel's number of a map, or 0 after an error.
func mapID(m *ebpf.Map) ebpf.MapID {
	info, err := m.Info()
	if err != nil {
		return 0
	}
	id, _ := info.ID()
	return id
}

// files returns the names of the files of a backend, which may be those of another version.
func files(c *Config) (names []string) {
	entries, _ := os.ReadDir(c.Dir) // an error means no folder, or not one that this process may read
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// replaceFile calls pin to create a file in a BPF file system. It replaces an existing file
// at path.
func replaceFile(path string, pin func(string) error) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return pin(path)
}

// readMap returns all entries of a hash map.
func readMap[K comparable, V any](m *ebpf.Map) (map[K]V, error) {
	const chunk = 4096
	out := map[K]V{}
	keys, values := make([]K, chunk), make([]V, chunk)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			out[keys[i]] = values[i]
		}
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("socketlb: cannot read map %s: %w", m, err)
		}
	}
}

// putAll writes entries in one call.
func putAll[K, V any](b *Backend, m *ebpf.Map, keys []K, values []V) error {
	b.writes += len(keys)
	if len(keys) == 0 {
		return nil
	}
	if _, err := m.BatchUpdate(keys, values, nil); err != nil {
		return fmt.Errorf("cannot write to map %s: %w", m, err)
	}
	return nil
}

// removeAll deletes those of the entries that exist, in one call if all do.
func removeAll[K any](b *Backend, m *ebpf.Map, keys []K) error {
	b.writes += len(keys)
	done, _ := m.BatchDelete(keys, nil)
	for _, k := range keys[done:] { // a batch ends at a missing entry
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("cannot delete from map %s: %w", m, err)
		}
	}
	return nil
}
