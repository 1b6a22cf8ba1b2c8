package socketlb

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/internal/inetdiag"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/ruleset"
)

// stalePeers returns the peers whose endpoint leaves with these changes. In a full delta that
// includes the endpoints in the maps of an earlier process that left while no process ran.
func (b *Backend) stalePeers(changes []ruleset.Change) map[peer]bool {
	stale, keeps := map[peer]bool{}, map[memberKey]struct{}{}
	for _, c := range changes {
		if c.Key.Protocol != v1.ProtocolUDP {
			continue
		}
		wanted := membersOf(c.New)
		for k := range membersOf(c.Old) {
			if _, ok := wanted[k]; ok || k.Target != flowMember {
				continue
			}
			for i := range c.Old.Frontends {
				stale[peer{keyOf(&c.Old.Frontends[i], c.Key), k.Endpoint}] = true
			}
		}
		maps.Copy(keeps, wanted)
	}
	of := map[serviceID][]frontendKey{}
	for at, f := range b.found.frontends {
		of[f.Service] = append(of[f.Service], at)
	}
	for k := range b.found.members {
		if _, ok := keeps[k]; ok || k.Target != flowMember {
			continue
		}
		for _, at := range of[k.Service] {
			stale[peer{at, k.Endpoint}] = true
		}
	}
	return stale
}

// abortStale ends the connected UDP sockets of these peers: no program sees their datagrams. The
// process gets ECONNABORTED, and its next socket another endpoint. Errors are logged, since an
// endpoint that is gone must not keep the change from being applied, and so are open sockets in no network
// namespace that this process may enter.
func (b *Backend) abortStale(stale map[peer]bool) {
	if len(stale) == 0 {
		return
	}
	sockets, err := b.connectedTo(stale)
	var refused error
	if err == nil && len(sockets) != 0 {
		refused, err = b.abort(sockets)
	}
	if err != nil {
		b.config.Log.Warn("socketlb: cannot end UDP sockets whose endpoint is gone", "error", err)
		return
	}
	if b.missingReported || len(sockets) == 0 {
		return
	}
	open, err := b.connectedTo(stale)
	maps.DeleteFunc(sockets, func(cookie uint64, _ bool) bool { return !open[cookie] }) // closed since
	if err != nil || len(sockets) == 0 {
		return
	}
	b.missingReported = true // every later change would repeat it
	if refused == nil {
		refused = errors.New("no process in their network namespace is in /proc (hostPID)")
	}
	b.config.Log.Warn("socketlb: cannot end UDP sockets in other network namespaces: they stay with the endpoint that is gone", "sockets", len(sockets), "error", refused)
}

// connectedTo returns the cookies of the sockets that are connected to one of the peers. In stale the address of a
// NodePort is that of its frontendKey.
func (b *Backend) connectedTo(stale map[peer]bool) (map[uint64]bool, error) {
	out := map[uint64]bool{}
	note := func(cookie uint64, p peer) {
		anywhere := p
		anywhere.Service.Addr = anyAddr(netip.AddrFrom16(p.Service.Addr).Is4In6()).As16()
		if stale[p] || stale[anywhere] {
			out[cookie] = true
		}
	}
	recents := make([]recentPeer, b.maps["recent"].MaxEntries())
	var cursor ebpf.MapBatchCursor
	n, err := b.maps["recent"].BatchLookup(&cursor, make([]uint32, len(recents)), recents, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, err
	}
	for _, r := range recents[:n] {
		if r.Cookie != 0 {
			note(r.Cookie, r.Peer)
		}
	}
	others, err := readMap[uint64, peer](b.maps["peers"])
	for cookie, p := range others {
		note(cookie, p)
	}
	return out, err
}

// abort ends the UDP sockets with these cookies, in all network namespaces that this process may
// enter, and deletes the cookies that it finds. refused is the error about another namespace, if any.
func (b *Backend) abort(cookies map[uint64]bool) (refused, err error) {
	return b.host.eachNamespace(func() error {
		var sockets []inetdiag.Socket
		var errs []error
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			errs = append(errs, inetdiag.List(unix.IPPROTO_UDP, family, math.MaxUint32, func(s inetdiag.Socket) {
				if cookies[s.Cookie()] {
					sockets = append(sockets, s)
				}
			}))
		}
		for _, s := range sockets {
			delete(cookies, s.Cookie())
			if err := s.Destroy(); !errors.Is(err, unix.ENOENT) { // ENOENT: it was closed
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
}

// eachNamespace calls f in the node's network namespace and in those of all processes, and
// continues after an error of f. refused is the first error about a namespace that this process may
// not enter.
func (h *host) eachNamespace(f func() error) (refused, failed error) {
	failed = netns.In(h.ns.File(), f)
	own, errOwn := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", h.ns.File().Fd()))
	links, err := filepath.Glob("/proc/[0-9]*/ns/net")
	failed = errors.Join(failed, errOwn, err)
	seen := map[string]bool{own: true}
	for _, path := range links {
		id, err := os.Readlink(path)
		if err == nil && seen[id] {
			continue
		}
		seen[id] = true
		entered := false
		var file *os.File
		if err == nil {
			file, err = os.Open(path)
		}
		if err == nil {
			err = netns.In(file, func() error { entered = true; return f() })
			file.Close()
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // the process has ended
		case !entered && errors.Is(err, fs.ErrPermission):
			refused = cmp.Or(refused, fmt.Errorf("%s: %w", path, err))
		default:
			failed = errors.Join(failed, err)
		}
	}
	return refused, failed
}
