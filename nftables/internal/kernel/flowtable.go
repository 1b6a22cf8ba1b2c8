//go:build linux

package kernel

import (
	"slices"

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

// priorityFilter is the priority of the flowtable (NF_IP_PRI_FILTER).
const priorityFilter = 0

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
	w.batch.Uint32(flowtableHookPriority, priorityFilter)
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
		w.batch.Uint32(flowtableHookPriority, priorityFilter)
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
			hook.number(flowtableHookNum) == unix.NF_NETDEV_INGRESS && hook.number(flowtableHookPriority) == priorityFilter}
		for typ, name := range nfnl.Attributes(hook[flowtableHookDevices]) {
			if typ == deviceName {
				k.Devices[nfnl.String(name)] = true
			}
		}
		out[a.text(flowtableAttrName)] = k
	})
	return out, err
}
