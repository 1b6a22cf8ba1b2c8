//go:build linux

package kernel

import (
	"encoding/binary"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

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
func (w *Writer) newFlowtable(f tracker.Family) {
	w.open("create flowtable "+layout.FastPath, unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, f)
	w.batch.String(flowtableAttrName, layout.FastPath)
	w.batch.Nest(flowtableAttrHook)
	w.batch.Uint32(flowtableHookNum, unix.NF_NETDEV_INGRESS)
	w.batch.Uint32(flowtableHookPriority, uint32(priorityFilter))
	w.batch.Unnest()
	w.batch.Uint32(flowtableAttrFlags, flowtableCounter)
	w.batch.End()
}

// devices adds devices to the flowtable or deletes them. what labels the message in errors.
func (w *Writer) devices(what string, typ, flags uint16, f tracker.Family, names []string) {
	for names := range slices.Chunk(names, maxDevices) {
		w.open(what, typ, flags, f)
		w.batch.String(flowtableAttrName, layout.FastPath)
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

// Flowtables returns the table's flowtables by name.
func (c *Conn) Flowtables(table string, f tracker.Family) (out map[string]Flowtable, err error) {
	begin := func() { out = map[string]Flowtable{} }
	err = c.dump(table, f, unix.NFT_MSG_GETFLOWTABLE, begin, func(a *attributes) {
		hook := parse(a[flowtableAttrHook])
		k := Flowtable{Devices: map[string]bool{}, Sound: a.number(flowtableAttrFlags) == flowtableCounter &&
			hook.number(flowtableHookNum) == unix.NF_NETDEV_INGRESS && hook.number(flowtableHookPriority) == uint32(priorityFilter)}
		for typ, name := range nfnl.Attributes(hook[flowtableHookDevices]) {
			if typ == deviceName {
				k.Devices[nfnl.String(name)] = true
			}
		}
		out[a.text(flowtableAttrName)] = k
	})
	return out, err
}

// established sends connections to the chain to-fast-path if they are established, have a
// translated destination and enough packets, and run between chosen interfaces.
func (w Rules) established() rule {
	r := rule(ctHas(expr.CtKeySTATE, expr.CtStateBitESTABLISHED)).with(ctDNAT()...)
	for _, key := range []expr.MetaKey{expr.MetaKeyIIFNAME, expr.MetaKeyOIFNAME} {
		r = r.with(load(key, firstReg), in(layout.FastPathInterfaces))
	}
	return r.with(
		of(&expr.Ct{Key: expr.CtKeyPKTS, Register: firstReg}),
		of(&expr.Byteorder{SourceRegister: firstReg, DestRegister: firstReg, Op: expr.ByteorderHton, Len: 8, Size: 8}),
		of(&expr.Cmp{Op: expr.CmpOpGt, Register: firstReg, Data: binary.BigEndian.AppendUint64(nil, uint64(w.Offload.AfterPackets))}),
		jump(layout.ChainToFastPath),
	)
}

// toFastPath puts connections on the fast path whose original destination is a frontend of a
// Service. Its rules store the dispatch key, as the NAT chains do, because the nft tool cannot
// show a rule that ignores the result of a map look-up.
func (w Rules) toFastPath() []rule {
	protocols := []byte{unix.IPPROTO_TCP}
	if w.Offload.UDP {
		protocols = append(protocols, unix.IPPROTO_UDP)
	}
	var out []rule
	for _, p := range protocols {
		is := rule{proto(firstReg), equal(firstReg, []byte{p})}
		portKey := func(reg uint32) []part { return []part{proto(reg), originalPort(reg + 1)} }
		flow := of(&expr.FlowOffload{Name: layout.FastPath})
		out = append(out,
			is.with(w.originalAddr(firstReg)).with(portKey(firstReg+w.words())...).with(found(layout.ServiceIPs), storeDispatch(), flow),
			is.with(w.originalAddr(firstReg), in(layout.NodePortIPs)).with(portKey(firstReg)...).with(found(layout.NodePorts), storeDispatch(), flow),
		)
	}
	return append(out, rule(hasDispatch()).with(resetPriority()...))
}

// originalAddr and originalPort load the destination before translation.
func (w Rules) originalAddr(reg uint32) part {
	if w.Family == tracker.IPv6 {
		return original(nfnl.CtDstIP6, reg)
	}
	return original(nfnl.CtDstIP, reg)
}

func originalPort(reg uint32) part { return original(nfnl.CtProtoDst, reg) }

func original(key, reg uint32) part {
	return func(scope) ([]byte, error) { return nfnl.OriginalCt(key, reg), nil }
}
