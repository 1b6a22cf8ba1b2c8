//go:build linux

// Bpfmaps is a data plane of three BPF maps, for authors of XDP and tc programs. It follows the API server and
// keeps the maps up to date; an XDP or tc program that its author attaches reads them. It is the shortest way
// from Services to maps: package ruleset/driver orders writes, numbers pools, fills slots without gaps, and
// adopts the maps after a restart.
//
//	bpfmaps --node node-a --pin /sys/fs/bpf/lb
//
// A program looks up the destination of a packet in lb_frontends. For the action forward it picks a slot
// below the size, and finds the endpoint in lb_backends. IPv4 addresses are ::ffff:a.b.c.d, and a NodePort has
// the address ::.
//
//	struct frontend_key { __u8 addr[16]; __be16 port; __u8 protocol, family; };
//	struct target       { __u32 pool, size, action; };                       // 0 forward, 1 reject, 2 drop
//	struct frontend     { struct target external, internal; __u32 masquerade, affinity; };
//	struct backend_key  { __u32 pool, slot; };
//	struct backend      { __u8 addr[16]; __be16 port; __u16 weight; };
//
// Two things are easily done wrong here:
//   - The number of a pool must survive a restart, because packets use it while a new process compares the
//     maps. [ruleset.Port].ID does not survive; [driver.Numbered] reads the numbers from a map of names.
//   - The size belongs in the entry of the frontend. A program that counts slots itself may run between two writes.
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"iter"
	"log"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"syscall"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/go-proxier/proxier/examples/informers"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server; in a pod, its ServiceAccount by default")
	node := flag.String("node", os.Getenv("NODE_NAME"), "name of this node")
	pin := flag.String("pin", "/sys/fs/bpf/lb", "folder of a BPF file system for the maps; they stay when the program ends")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, *kubeconfig, *node, *pin, slog.Default()); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, kubeconfig, node, pin string, log *slog.Logger) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: node}, Log: log})
	if err != nil {
		return err
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t, Budget: ruleset.DefaultBudget(), Log: log})
	if err != nil {
		return err
	}
	m, err := openMaps(pin, maxPools)
	if err != nil {
		return err
	}
	defer m.close()
	plane, err := newPlane(m)
	if err != nil {
		return err
	}
	cursor := engine.Attach("bpf", plane)
	loop, err := runner.New(runner.Config{Log: log}, cursor.Sync)
	if err != nil {
		return err
	}
	engine.Notify(loop.Trigger)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return loop.Run(ctx) })
	g.Go(func() error {
		return informers.Feed(ctx, informers.Config{Client: client, Tracker: t, Node: node, Log: log})
	})
	return g.Wait()
}

// The keys and values of the maps.
type (
	frontendKey struct {
		Addr     [16]byte
		Port     [2]byte // big endian
		Protocol uint8
		Family   uint8
	}
	target   struct{ Pool, Size, Action uint32 }
	frontend struct {
		// External is for packets from elsewhere, Internal for those of this node and its pods.
		External, Internal target
		// Masquerade is a ruleset.Masquerade, and Affinity the time of client affinity in seconds.
		Masquerade, Affinity uint32
	}
	backendKey struct{ Pool, Slot uint32 }
	backend    struct {
		Addr   [16]byte
		Port   [2]byte // big endian
		Weight uint16
	}
	poolName [320]byte // a driver.Pool in JSON, and zero bytes
)

// The actions of a frontend.
const (
	forward = iota
	reject
	drop
)

// maxPools is the number of pools for which the maps have room. They hold twice as many
// frontends, and 16 times as many endpoints. A Service that does not fit fails alone, and
// is retried.
const maxPools = 1 << 16

type maps struct{ frontends, backends, names *ebpf.Map }

// openMaps opens the maps in a folder or makes them. With "" they belong to the process alone.
func openMaps(pin string, pools uint32) (m *maps, err error) {
	if pin != "" {
		if err := os.MkdirAll(pin, 0o700); err != nil {
			return nil, err
		}
	}
	m = &maps{}
	for _, s := range []struct {
		to             **ebpf.Map
		name           string
		key, value, of uint32
	}{
		{&m.frontends, "lb_frontends", 20, 32, 2 * pools},
		{&m.backends, "lb_backends", 8, 20, 16 * pools},
		{&m.names, "lb_names", 4, 320, pools},
	} {
		const noPrealloc = 1 // BPF_F_NO_PREALLOC: the maps are as large as what they hold
		spec := &ebpf.MapSpec{Name: s.name, Type: ebpf.Hash, KeySize: s.key, ValueSize: s.value, MaxEntries: s.of, Flags: noPrealloc}
		if pin != "" {
			spec.Pinning = ebpf.PinByName
		}
		if *s.to, err = ebpf.NewMapWithOptions(spec, ebpf.MapOptions{PinPath: pin}); err != nil {
			m.close()
			return nil, fmt.Errorf("map %s: %w", s.name, err)
		}
	}
	return m, nil
}

func (m *maps) close() {
	for _, x := range []*ebpf.Map{m.frontends, m.backends, m.names} {
		x.Close() // a nil map has nothing to close
	}
}

// newPlane returns the backend that writes the maps, which may have entries of an earlier process.
func newPlane(m *maps) (*driver.Driver, error) {
	names := &driver.Numbered[poolName, poolName]{Table: *table[uint32, poolName](m.names, same, same), Low: 1, High: maxPools, Name: same[poolName]}
	slots := &driver.Slots[uint32, backend]{Table: *table[driver.Slot[uint32], backend](m.backends,
		func(s driver.Slot[uint32]) backendKey { return backendKey{s.Pool, uint32(s.N)} },
		func(k backendKey) driver.Slot[uint32] { return driver.Slot[uint32]{Pool: k.Pool, N: int(k.Slot)} })}
	frontends := table[driver.Frontend, frontend](m.frontends, keyOf, frontendOf)
	return driver.New(driver.Plane{
		Limits: ruleset.Limits{Lacks: ruleset.LacksSourceRanges | ruleset.LacksHash},
		Tables: []driver.Ordered{names, slots, frontends},
		Want: func(s *ruleset.Port) {
			targets := map[ruleset.Target]target{ruleset.TargetReject: {Action: reject}, ruleset.TargetDrop: {Action: drop}}
			for name, eps := range driver.Pools(s, false) {
				var pool []backend
				for _, ep := range eps {
					pool = append(pool, backend{ep.Addr.Addr().As16(), bigEndian(ep.Addr.Port()), ep.Weight})
				}
				id := names.Want(nameOf(name))
				targets[name.Target] = target{id, uint32(slots.WantPool(id, pool)), forward}
			}
			for at, f := range driver.Frontends(s) {
				frontends.Want(at, frontend{targets[f.Target], targets[f.Internal], uint32(f.Masquerade), uint32(s.Spec.Affinity.Seconds())})
			}
		},
	})
}

// table returns a driver's table of a map, which has other keys.
func table[K, V comparable, MK any](m *ebpf.Map, key func(K) MK, back func(MK) K) *driver.Table[K, V] {
	return &driver.Table[K, V]{
		Installed: func(*ruleset.Delta) (iter.Seq2[K, V], error) {
			return func(yield func(K, V) bool) {
				var k MK
				var v V
				for all := m.Iterate(); all.Next(&k, &v); {
					if !yield(back(k), v) {
						return
					}
				}
			}, nil
		},
		Put: func(k K, v V) error { return m.Put(key(k), v) },
		Delete: func(k K) error {
			if err := m.Delete(key(k)); !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
			return nil
		},
		Equal: func(a, b V) bool { return a == b },
	}
}

func same[T any](v T) T { return v }

func bigEndian(port uint16) (b [2]byte) {
	binary.BigEndian.PutUint16(b[:], port)
	return b
}

// protocols are the numbers of IP's protocols (RFC 790, RFC 768, RFC 9260).
var protocols = map[v1.Protocol]uint8{v1.ProtocolTCP: 6, v1.ProtocolUDP: 17, v1.ProtocolSCTP: 132}

func keyOf(f driver.Frontend) frontendKey {
	k := frontendKey{Port: bigEndian(f.Port), Protocol: protocols[f.Protocol], Family: uint8(f.Family)}
	if f.Addr.IsValid() {
		k.Addr = f.Addr.As16()
	}
	return k
}

// frontendOf returns the frontend of a key, as keyOf made it.
func frontendOf(k frontendKey) driver.Frontend {
	f := driver.Frontend{Port: binary.BigEndian.Uint16(k.Port[:]), Family: tracker.Family(k.Family)}
	for name, n := range protocols {
		if n == k.Protocol {
			f.Protocol = name
		}
	}
	if k.Addr != [16]byte{} {
		f.Addr = netip.AddrFrom16(k.Addr).Unmap()
	}
	return f
}

func nameOf(p driver.Pool) (n poolName) {
	text, _ := json.Marshal(p)
	copy(n[:], text)
	return n
}
