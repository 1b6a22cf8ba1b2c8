//go:build linux

package nftables

import (
	"encoding/binary"
	"maps"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/tracker"
)

// fastPath is the name of the flowtable. Some shorter names are keywords of nft.
const fastPath = "fast-path"

// Attributes that golang.org/x/sys/unix lacks (linux/netfilter/nf_tables.h): NFTA_FLOWTABLE_*,
// NFTA_FLOWTABLE_HOOK_* and NFTA_DEVICE_NAME.
const (
	flowtableAttrName  = 2
	flowtableAttrHook  = 3
	flowtableAttrFlags = 7

	flowtableHookNum      = 1
	flowtableHookPriority = 2
	flowtableHookDevices  = 3

	deviceName = 1
)

// flowtableCounter requests that connection tracking counts the packets of offloaded
// connections (NFT_FLOWTABLE_COUNTER).
const flowtableCounter = 2

// maxDevices is the largest number of devices in a message. The kernel accepts 255
// (NFT_NETDEVICE_MAX).
const maxDevices = 128

// newFlowtable creates the flowtable without devices. It does not use the library, whose
// messages cannot be in the same transaction as the rules and cannot delete one device.
func (w *writer) newFlowtable(f tracker.Family) {
	w.structural = true
	w.open("create flowtable "+fastPath, unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, f)
	w.batch.String(flowtableAttrName, fastPath)
	w.batch.Nest(flowtableAttrHook)
	w.batch.Uint32(flowtableHookNum, unix.NF_NETDEV_INGRESS)
	w.batch.Uint32(flowtableHookPriority, uint32(priorityFilter))
	w.batch.Unnest()
	w.batch.Uint32(flowtableAttrFlags, flowtableCounter)
	w.batch.End()
}

// devices adds devices to the flowtable or deletes them. what labels the message in errors.
func (w *writer) devices(what string, typ, flags uint16, f tracker.Family, names []string) {
	for names := range slices.Chunk(names, maxDevices) {
		w.open(what, typ, flags, f)
		w.batch.String(flowtableAttrName, fastPath)
		w.batch.Nest(flowtableAttrHook)
		// Kernels before 5.8 need these in changes, too.
		w.batch.Uint32(flowtableHookNum, unix.NF_NETDEV_INGRESS)
		w.batch.Uint32(flowtableHookPriority, uint32(priorityFilter))
		w.batch.Nest(flowtableHookDevices)
		for _, name := range names {
			w.batch.String(deviceName, name)
		}
		w.batch.Unnest()
		w.batch.Unnest()
		w.batch.End()
	}
}

// kernelFlowtable is a flowtable as the kernel has it.
type kernelFlowtable struct {
	hook, priority, flags uint32
	devices               map[string]bool
}

// sound reports whether the flowtable is as newFlowtable makes it, apart from its devices.
func (k kernelFlowtable) sound() bool {
	return k.devices != nil && k.hook == unix.NF_NETDEV_INGRESS && k.priority == uint32(priorityFilter) && k.flags == flowtableCounter
}

// readFlowtables returns the table's flowtables by name.
func (b *Backend) readFlowtables(table string, f tracker.Family) (out map[string]kernelFlowtable, err error) {
	begin := func() { out = map[string]kernelFlowtable{} }
	err = b.dump(table, f, unix.NFT_MSG_GETFLOWTABLE, begin, func(a *attributes) {
		hook := parse(a[flowtableAttrHook])
		k := kernelFlowtable{
			hook: hook.number(flowtableHookNum), priority: hook.number(flowtableHookPriority),
			flags: a.number(flowtableAttrFlags), devices: map[string]bool{},
		}
		for typ, name := range nfnl.Attributes(hook[flowtableHookDevices]) {
			if typ == deviceName {
				k.devices[nfnl.String(name)] = true
			}
		}
		out[a.text(flowtableAttrName)] = k
	})
	return out, err
}

// clearFlowtables deletes the flowtables of an existing table, except a sound fast-path, which
// stays with its connections. The rules must have been deleted.
func (b *Backend) clearFlowtables(t *table, k *kernelTable) {
	for name, ft := range k.flowtables {
		if name == fastPath && t.offload != nil && ft.sound() {
			t.keptFlowtable = true
			continue
		}
		b.writer.delete("flowtable", unix.NFT_MSG_DELFLOWTABLE, flowtableAttrName, t.family, name)
	}
}

// has reports whether the table has a set that only some configurations need.
func (t *table) has(s set) bool {
	switch {
	case s >= firstAllowed:
		return t.prefixes[int(s-firstAllowed)]
	case s == setFastPathInterfaces:
		return t.offload != nil
	}
	return true
}

// compareFlowtables compares the table's flowtables with the model. A device whose interface is
// gone or was renamed may be missing.
func (b *Backend) compareFlowtables(t *table) error {
	found, err := b.readFlowtables(b.name, t.family)
	if err != nil {
		return err
	}
	ft, ok := found[fastPath]
	if t.offload != nil {
		if !ok || !ft.sound() {
			return drifted(t.family, "flowtable %s is missing or has other attributes", fastPath)
		}
		delete(found, fastPath)
	}
	for name := range found {
		return drifted(t.family, "unexpected flowtable %s", name)
	}
	missing, unexpected := missingNames(t.interfaces, ft.devices), missingNames(ft.devices, t.interfaces)
	if t.interfaces == nil || len(missing)+len(unexpected) == 0 {
		return nil
	}
	links, err := b.links()
	if err != nil {
		return err
	}
	for _, name := range missing {
		if links[name] == t.interfaces[name] {
			return drifted(t.family, "flowtable %s has no interface %s", fastPath, name)
		}
	}
	known := slices.Collect(maps.Values(t.interfaces))
	for _, name := range unexpected {
		if index, ok := links[name]; ok && !slices.Contains(known, index) {
			return drifted(t.family, "flowtable %s has unexpected interface %s", fastPath, name)
		}
	}
	return nil
}

// established sends connections to the chain to-fast-path if they are established, have a
// translated destination and enough packets, and run between chosen interfaces.
func (w rules) established() rule {
	r := rule(ctHas(expr.CtKeySTATE, expr.CtStateBitESTABLISHED)).with(ctDNAT()...)
	for _, key := range []expr.MetaKey{expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME} {
		r = r.with(load(key, firstReg), in(setFastPathInterfaces))
	}
	return r.with(
		of(&expr.Ct{Key: expr.CtKeyPKTS, Register: firstReg}),
		of(&expr.Byteorder{SourceRegister: firstReg, DestRegister: firstReg, Op: expr.ByteorderHton, Len: 8, Size: 8}),
		of(&expr.Cmp{Op: expr.CmpOpGt, Register: firstReg, Data: binary.BigEndian.AppendUint64(nil, uint64(w.offload.AfterPackets))}),
		jump(chainToFastPath),
	)
}

// toFastPath puts connections on the fast path whose original destination is a frontend of a
// Service. Its rules store the dispatch key, as the NAT chains do, because the nft tool cannot
// show a rule that ignores the result of a map look-up.
func (w rules) toFastPath() []rule {
	protocols := []byte{unix.IPPROTO_TCP}
	if w.offload.UDP {
		protocols = append(protocols, unix.IPPROTO_UDP)
	}
	var out []rule
	for _, p := range protocols {
		is := rule{proto(firstReg), equal(firstReg, []byte{p})}
		portKey := func(reg uint32) []part { return []part{proto(reg), originalPort(reg + 1)} }
		flow := of(&expr.FlowOffload{Name: fastPath})
		out = append(out,
			is.with(w.originalAddr(firstReg)).with(portKey(firstReg+w.words())...).with(found(setServiceIPs), storeDispatch(), flow),
			is.with(w.originalAddr(firstReg), in(setNodePortIPs)).with(portKey(firstReg)...).with(found(setNodePorts), storeDispatch(), flow),
		)
	}
	return append(out, rule(hasDispatch()).with(resetPriority()...))
}

// originalAddr and originalPort load the destination before translation.
func (w rules) originalAddr(reg uint32) part {
	key := expr.CtKeyDSTIP
	if w.family == tracker.IPv6 {
		key = expr.CtKeyDSTIP6
	}
	return of(&expr.Ct{Key: key, Register: reg})
}

func originalPort(reg uint32) part { return of(&expr.Ct{Key: expr.CtKeyPROTODST, Register: reg}) }
