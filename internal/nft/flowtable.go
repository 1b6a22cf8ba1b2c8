//go:build linux

package nft

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
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

// CreateFlowtable creates a flowtable without devices. It does not use the library, whose
// messages cannot be in the same transaction as the rules and cannot delete one device.
func (t Table) CreateFlowtable(name string) {
	t.open("create flowtable "+name, unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE)
	t.String(flowtableAttrName, name)
	t.Nest(flowtableAttrHook)
	t.Uint32(flowtableHookNum, unix.NF_NETDEV_INGRESS)
	t.Uint32(flowtableHookPriority, priorityFilter)
	t.Unnest()
	t.Uint32(flowtableAttrFlags, flowtableCounter)
	t.End()
}

// DeleteFlowtable deletes a flowtable.
func (t Table) DeleteFlowtable(name string) {
	t.delete("flowtable", unix.NFT_MSG_DELFLOWTABLE, flowtableAttrName, name)
}

// AddDevices adds interfaces to a flowtable.
func (t Table) AddDevices(flowtable string, names []string) {
	t.devices("add interfaces to flowtable ", unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, flowtable, names)
}

// DeleteDevices deletes interfaces from a flowtable.
func (t Table) DeleteDevices(flowtable string, names []string) {
	t.devices("delete interfaces of flowtable ", unix.NFT_MSG_DELFLOWTABLE, 0, flowtable, names)
}

func (t Table) devices(what string, typ, flags uint16, flowtable string, names []string) {
	for names := range slices.Chunk(names, maxDevices) {
		t.open(what+flowtable, typ, flags)
		t.String(flowtableAttrName, flowtable)
		t.Nest(flowtableAttrHook)
		// Kernels before 5.8 need these in changes, too.
		t.Uint32(flowtableHookNum, unix.NF_NETDEV_INGRESS)
		t.Uint32(flowtableHookPriority, priorityFilter)
		t.Nest(flowtableHookDevices)
		for _, name := range names {
			t.String(deviceName, name)
		}
		t.Unnest()
		t.Unnest()
		t.End()
	}
}

// Flowtables returns the table's flowtables by name.
func (c *Conn) Flowtables(table string, family byte) (out map[string]Flowtable, err error) {
	begin := func() { out = map[string]Flowtable{} }
	err = c.dump(table, family, unix.NFT_MSG_GETFLOWTABLE, begin, func(a *attributes) {
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
