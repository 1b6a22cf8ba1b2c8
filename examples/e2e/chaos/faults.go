//go:build linux

package main

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fault is something that goes wrong. run returns what it did, for the record of the world.
type fault struct {
	name string
	run  func(*world) (string, error)
}

// shell returns a fault that runs a shell command on the node. The command may fail, for
// example because what it deletes does not exist.
func shell(name, text string) fault {
	return fault{name, func(w *world) (string, error) { return w.shell(text), nil }}
}

// commonFaults are the faults of every mode.
var commonFaults = []fault{
	{"SIGKILL", func(w *world) (string, error) { return "", w.restart(syscall.SIGKILL, nil) }},
	{"SIGTERM", func(w *world) (string, error) {
		return "", w.restart(syscall.SIGTERM, func() {
			for range 3 {
				w.objects.step()
			}
		})
	}},
	{"SIGSTOP", func(w *world) (string, error) {
		d := time.Duration(w.rng.IntN(1200)) * time.Millisecond
		p := w.agent.Process()
		p.Signal(syscall.SIGSTOP)
		time.AfterFunc(d, func() { p.Signal(syscall.SIGCONT) })
		return d.String(), nil
	}},
	{"watches end", func(w *world) (string, error) { w.server.endWatches(false); return "", nil }},
	{"watches expire", func(w *world) (string, error) { w.server.endWatches(true); return "", nil }},
	{"requests fail", func(w *world) (string, error) {
		n, expire := 1+w.rng.IntN(2), w.rng.IntN(2) == 0
		w.server.misbehave(func(m *misbehavior) { m.fail = n })
		w.server.endWatches(expire)
		return fmt.Sprintf("%d, expired %t", n, expire), nil
	}},
	{"odd events", func(w *world) (string, error) {
		n := w.rng.IntN(16)
		w.server.misbehave(func(m *misbehavior) {
			m.retype, m.duplicate, m.bookmarks, m.slow = n&1 != 0, n&2 != 0, n&4 != 0, n&8 != 0
		})
		return fmt.Sprint(n), nil
	}},
	{"address", func(w *world) (string, error) {
		a := pick(w.rng, otherAddr4+"/24", otherAddr6+"/64", "10.96.0.3/32")
		return a, w.node.toggle(a)
	}},
	{"interface", func(w *world) (string, error) {
		l := pick(w.rng, "veth0", "veth1", "other0")
		return l, w.node.toggle(l)
	}},
}

// nftFaults damage the tables of mode nftables.
var nftFaults = []fault{
	shell("flush ruleset", "nft flush ruleset"),
	{"delete table", func(w *world) (string, error) {
		return w.shell("nft delete table " + w.family() + " proxier"), nil
	}},
	{"flush set", func(w *world) (string, error) {
		set := pick(w.rng, "service-ips", "endpoints", "service-nodeports", "handlers", "sticky-endpoints", "cluster-ips", "hairpin-connections", "nodeport-ips", "internal-service-ips")
		f := w.family()
		return w.shell(fmt.Sprintf("nft flush set %s proxier %s || nft flush map %s proxier %s", f, set, f, set)), nil
	}},
	{"flush chain", func(w *world) (string, error) {
		chain := pick(w.rng, "services", "masquerading", "nat-output", "filter-forward", "firewall-check", "pool-1", "pool-2", "cluster-ip-1")
		return w.shell(fmt.Sprintf("nft flush chain %s proxier %s", w.family(), chain)), nil
	}},
	{"delete element", func(w *world) (string, error) {
		f, set := w.family(), pick(w.rng, "service-ips", "endpoints", "service-nodeports", "cluster-ips")
		text, err := w.node.Output("nft", "-s", "list", "table", f, "proxier")
		if err != nil {
			return "no table", nil
		}
		keys := slices.Sorted(maps.Keys(parseNFT(text).sets[set]))
		if len(keys) == 0 {
			return "no element", nil
		}
		return w.shell(fmt.Sprintf("nft delete element %s proxier %s '{ %s }'", f, set, pick(w.rng, keys...))), nil
	}},
	{"insert rule", func(w *world) (string, error) {
		return w.shell("nft insert rule " + w.family() + " proxier services counter"), nil
	}},
	{"foreign table", func(w *world) (string, error) {
		return w.shell(fmt.Sprintf("nft 'add table %[1]s other; add chain %[1]s other c { type nat hook prerouting priority -100; }; add rule %[1]s other c counter'; nft delete table %[1]s other", w.family())), nil
	}},
}

// offloadFaults damage the flowtable.
var offloadFaults = []fault{
	{"delete rules of the flowtable", func(w *world) (string, error) {
		return w.shell("nft flush chain " + w.family() + " proxier to-fast-path"), nil
	}},
	{"interface", func(w *world) (string, error) {
		l := pick(w.rng, "veth0", "veth1", "veth2", "veth3")
		return l, w.node.toggle(l)
	}},
}

// family returns an address family as nft names it.
func (w *world) family() string { return pick(w.rng, "ip", "ip6") }

// iptablesFaults damage the rules of mode iptables.
var iptablesFaults = []fault{
	{"flush nat", func(w *world) (string, error) { return w.shell(w.iptables() + " -t nat -F"), nil }},
	{"flush filter", func(w *world) (string, error) { return w.shell(w.iptables() + " -F"), nil }},
	{"flush both", func(w *world) (string, error) {
		t := w.iptables()
		return w.shell(t + " -t nat -F; " + t + " -F"), nil
	}},
	{"restore an old state", func(w *world) (string, error) {
		w.restored = true
		t := w.iptables()
		return w.shell(fmt.Sprintf("s=$(%[1]s-save); sleep 0.1; printf '%%s\\n' \"$s\" | %[1]s-restore", t)), nil
	}},
	{"foreign rule", func(w *world) (string, error) {
		t := w.iptables()
		return w.shell(t + " -I FORWARD -j ACCEPT; " + t + " -D FORWARD -j ACCEPT"), nil
	}},
	{"delete rule", deleteFixedRule},
}

func (w *world) iptables() string { return pick(w.rng, "iptables", "ip6tables") }

// fixedRule matches the rules of the chains that exist without any Service.
var fixedRule = regexp.MustCompile(`(?m)^-A (KUBE-POSTROUTING|KUBE-MARK-MASQ|KUBE-FORWARD|KUBE-SERVICES|KUBE-NODEPORTS|PREROUTING|OUTPUT|POSTROUTING|INPUT|FORWARD) .*$`)

// deleteFixedRule deletes one rule of a fixed chain.
func deleteFixedRule(w *world) (string, error) {
	tool, table := w.iptables(), pick(w.rng, "nat", "filter")
	text, err := w.node.Output(tool+"-save", "-t", table)
	if err != nil {
		return "", err
	}
	list := fixedRule.FindAllString(text, -1)
	if len(list) == 0 {
		return "no rule", nil
	}
	rule := "-D" + strings.TrimPrefix(pick(w.rng, list...), "-A")
	return w.shell(tool + " -t " + table + " " + rule), nil
}

// ipvsFaults damage the virtual servers, sets, addresses and rules of mode ipvs.
var ipvsFaults = []fault{
	shell("clear virtual servers", "ipvsadm -C"),
	shell("flush addresses", "ip addr flush dev kube-ipvs0"),
	shell("delete device", "ip link del kube-ipvs0"),
	{"flush set", func(w *world) (string, error) {
		set := pick(w.rng, "KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-NODE-PORT-TCP", "KUBE-LOAD-BALANCER")
		return w.shell("ipset flush " + set), nil
	}},
	{"flush nat", func(w *world) (string, error) { return w.shell(w.iptables() + " -t nat -F"), nil }},
	{"flush filter", func(w *world) (string, error) { return w.shell(w.iptables() + " -F"), nil }},
	{"delete server", func(w *world) (string, error) {
		return w.shell("ipvsadm -Sn | awk '$1==\"-A\"{print $2, $3; exit}' | xargs -r ipvsadm -D"), nil
	}},
}

// inMachine reports whether this process runs in a virtual machine of package internal/testing/vm.
func inMachine() bool { return os.Getenv("PROXIER_VM_INSIDE") != "" }

// machineFaults affect the whole machine, so that only virtual machines get them.
var machineFaults = []fault{
	{"clock", func(w *world) (string, error) {
		by := time.Duration(w.rng.IntN(96)-48) * time.Hour
		ts, err := unix.TimeToTimespec(time.Now().Add(by))
		if err != nil {
			return "", err
		}
		return by.String(), unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
	}},
	{"full connection tracking", func(w *world) (string, error) {
		// The agent's connections to the API server are tracked, too.
		before, err := os.ReadFile(trackedMax)
		if err != nil {
			return "", err
		}
		d := time.Duration(w.rng.IntN(3000)) * time.Millisecond
		time.AfterFunc(d, func() { os.WriteFile(trackedMax, before, 0) })
		w.server.endWatches(w.rng.IntN(2) == 0)
		return fmt.Sprint(d), os.WriteFile(trackedMax, []byte("1"), 0)
	}},
}

// trackedMax is the greatest number of tracked connections.
const trackedMax = "/proc/sys/net/netfilter/nf_conntrack_max"
