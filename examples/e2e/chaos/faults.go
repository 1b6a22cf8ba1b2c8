//go:build linux

package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// fault is something that goes wrong. run returns what it did, for the record of the world.
type fault struct {
	name   string
	effect effect
	run    func(*world) (string, error)
}

// effect holds what a fault does beside its own harm.
type effect uint

const (
	// kills: the agent's process ends. outage: rules are missing, or packets get lost, until the
	// agent has repaired the rules.
	kills effect = 1 << iota
	outage
	none effect = 0
)

// shell returns a fault that runs a shell command on the node and removes rules. The command may
// fail, for example because what it deletes does not exist.
func shell(name, text string) fault {
	return fault{name, outage, func(w *world) (string, error) { return w.shell(text), nil }}
}

// commonFaults are the faults of every mode.
var commonFaults = []fault{
	{"SIGKILL", kills, func(w *world) (string, error) { return "", w.restart(syscall.SIGKILL, nil) }},
	{"SIGTERM", kills, func(w *world) (string, error) {
		return "", w.restart(syscall.SIGTERM, func() {
			for range 3 {
				w.objects.step()
			}
		})
	}},
	{"SIGSTOP", none, func(w *world) (string, error) {
		d := time.Duration(w.rng.IntN(1200)) * time.Millisecond
		p := w.agent.Process.Process
		p.Signal(syscall.SIGSTOP)
		time.AfterFunc(d, func() { p.Signal(syscall.SIGCONT) })
		return d.String(), nil
	}},
	{"watches end", none, func(w *world) (string, error) { w.server.endWatches(false); return "", nil }},
	{"watches expire", none, func(w *world) (string, error) { w.server.endWatches(true); return "", nil }},
	{"requests fail", none, func(w *world) (string, error) {
		n, expire := 1+w.rng.IntN(2), w.rng.IntN(2) == 0
		w.server.locked(func() { w.server.fail = n })
		w.server.endWatches(expire)
		return fmt.Sprintf("%d, expired %t", n, expire), nil
	}},
	{"odd events", none, func(w *world) (string, error) {
		n := w.rng.IntN(4)
		w.server.locked(func() { w.server.retype, w.server.duplicate = n&1 != 0, n&2 != 0 })
		return fmt.Sprint(n), nil
	}},
	{"address", none, func(w *world) (string, error) {
		a := pick(w.rng, otherAddr4+"/24", otherAddr6+"/64", "10.96.0.3/32")
		return a, w.toggle(a)
	}},
	{"interface", none, func(w *world) (string, error) {
		l := pick(w.rng, "veth0", "veth1", "other0")
		return l, w.toggle(l)
	}},
	{"others' rules", none, func(w *world) (string, error) {
		r := pick(w.rng, othersRules...)
		first := w.shell(r[0])
		time.Sleep(time.Duration(w.rng.IntN(300)) * time.Millisecond)
		return first + "; " + w.shell(r[1]), nil
	}},
	{"node restarts", kills | outage, func(w *world) (string, error) {
		return "", w.restart(syscall.SIGKILL, func() {
			if err := w.agent.cleanUp(); err != nil {
				w.rec.failf("run --cleanup: %v", err)
			}
		})
	}},
}

// othersRules holds pairs of commands that add and remove rules as other programs do.
var othersRules = [][2]string{
	{
		`nft 'add table inet others; add chain inet others pre {type nat hook prerouting priority -150;};
			add rule inet others pre ip daddr 203.0.113.99 dnat ip to 203.0.113.98; add chain inet others transit {type filter hook forward priority 10;};
			add rule inet others transit ip daddr 203.0.113.99 drop'`,
		"nft delete table inet others",
	},
	{
		`nft 'add table ip proxiers; add chain ip proxiers c { type nat hook prerouting priority -100; }; add rule ip proxiers c counter'`,
		"nft delete table ip proxiers",
	},
	{
		"iptables -t nat -N OTHERS; iptables -t nat -I PREROUTING -d 203.0.113.99 -j OTHERS; iptables -A FORWARD -d 203.0.113.99 -j DROP",
		"iptables -t nat -D PREROUTING -d 203.0.113.99 -j OTHERS; iptables -t nat -X OTHERS; iptables -D FORWARD -d 203.0.113.99 -j DROP",
	},
}

// nftFaults damage the tables of mode nftables.
var nftFaults = []fault{
	shell("flush ruleset", "nft flush ruleset"),
	{"delete table", outage, func(w *world) (string, error) {
		return w.shell("nft delete table " + w.family() + " proxier"), nil
	}},
	{"flush set", outage, func(w *world) (string, error) {
		set := pick(w.rng, "service-ips", "tcp-endpoints", "service-nodeports", "handlers", "sticky-endpoints", "cluster-ips", "hairpin-connections", "nodeport-ips", "internal-service-ips")
		f := w.family()
		return w.shell(fmt.Sprintf("nft flush set %s proxier %s || nft flush map %s proxier %s", f, set, f, set)), nil
	}},
	{"flush chain", outage, func(w *world) (string, error) {
		chain := pick(w.rng, "services", "masquerading", "nat-output", "filter-forward", "firewall-check", "pool-1", "pool-2", "cluster-ip-1")
		return w.shell(fmt.Sprintf("nft flush chain %s proxier %s", w.family(), chain)), nil
	}},
	{"delete element", outage, func(w *world) (string, error) {
		f, set := w.family(), pick(w.rng, "service-ips", "tcp-endpoints", "service-nodeports", "cluster-ips")
		text, err := w.node.sh(fmt.Sprintf("nft -s list set %[1]s proxier %[2]s || nft -s list map %[1]s proxier %[2]s", f, set))
		if err != nil {
			return "no table", nil
		}
		_, list, _ := strings.Cut(text, "elements = { ")
		list, _, _ = strings.Cut(list, " }")
		keys := element.FindAllStringSubmatch(list, -1)
		if len(keys) == 0 {
			return "no element", nil
		}
		return w.shell(fmt.Sprintf("nft delete element %s proxier %s '{ %s }'", f, set, pick(w.rng, keys...)[1])), nil
	}},
	{"insert rule", none, func(w *world) (string, error) {
		return w.shell("nft insert rule " + w.family() + " proxier services counter"), nil
	}},
	{"iptables -F", none, func(w *world) (string, error) {
		return w.shell("iptables -F; iptables -t nat -F; ip6tables -F; ip6tables -t nat -F"), nil
	}},
}

// element matches an element of a set or map in the output of nft.
var element = regexp.MustCompile(`([^,"]+?)(?: comment "[^"]*")?(?: : [^,]+?)?\s*(?:,\s*|$)`)

// offloadFaults damage the flowtable.
var offloadFaults = []fault{
	{"delete rules of the flowtable", none, func(w *world) (string, error) {
		return w.shell("nft flush chain " + w.family() + " proxier to-fast-path"), nil
	}},
	{"interface", none, func(w *world) (string, error) {
		l := pick(w.rng, "veth0", "veth1", "veth2", "veth3")
		return l, w.toggle(l)
	}},
}

// family returns an address family as nft names it.
func (w *world) family() string { return pick(w.rng, "ip", "ip6") }

// iptablesFaults damage the rules of mode iptables.
var iptablesFaults = []fault{
	{"flush nat", outage, func(w *world) (string, error) { return w.shell(w.iptables() + " -t nat -F"), nil }},
	{"flush filter", outage, func(w *world) (string, error) { return w.shell(w.iptables() + " -F"), nil }},
	{"flush both", outage, func(w *world) (string, error) {
		t := w.iptables()
		return w.shell(t + " -t nat -F; " + t + " -F"), nil
	}},
	{"restore an old state", outage, func(w *world) (string, error) {
		w.restored = true
		t := w.iptables()
		return w.shell(fmt.Sprintf("s=$(%[1]s-save); sleep 0.1; printf '%%s\\n' \"$s\" | %[1]s-restore", t)), nil
	}},
	{"delete rule", outage, deleteFixedRule},
}

func (w *world) iptables() string { return pick(w.rng, "iptables", "ip6tables") }

// fixedRule matches the rules of the chains that exist without any Service.
var fixedRule = regexp.MustCompile(`(?m)^-A (KUBE-POSTROUTING|KUBE-MARK-MASQ|KUBE-FORWARD|KUBE-SERVICES|KUBE-NODEPORTS|PREROUTING|OUTPUT|POSTROUTING|INPUT|FORWARD) .*$`)

func deleteFixedRule(w *world) (string, error) {
	tool, table := w.iptables(), pick(w.rng, "nat", "filter")
	text, err := w.node.sh(tool + "-save -t " + table)
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
	{"flush set", outage, func(w *world) (string, error) {
		set := pick(w.rng, "KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-NODE-PORT-TCP", "KUBE-LOAD-BALANCER")
		return w.shell("ipset flush " + set), nil
	}},
	{"flush nat", outage, func(w *world) (string, error) { return w.shell(w.iptables() + " -t nat -F"), nil }},
	{"flush filter", outage, func(w *world) (string, error) { return w.shell(w.iptables() + " -F"), nil }},
	{"delete server", outage, func(w *world) (string, error) {
		return w.shell("ipvsadm -Sn | awk '$1==\"-A\"{print $2, $3; exit}' | xargs -r ipvsadm -D"), nil
	}},
}

// inMachine reports whether this process runs in a virtual machine of package internal/testing/vm.
func inMachine() bool { return os.Getenv("PROXIER_VM_INSIDE") != "" }

// machineFaults affect the whole machine, so that only virtual machines get them.
var machineFaults = []fault{
	{"clock", none, func(w *world) (string, error) {
		by := time.Duration(w.rng.IntN(96)-48) * time.Hour
		ts, err := unix.TimeToTimespec(time.Now().Add(by))
		if err != nil {
			return "", err
		}
		return by.String(), unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
	}},
	{"full connection tracking", outage, func(w *world) (string, error) {
		// The agent's connections to the API server are tracked, too.
		w.server.endWatches(w.rng.IntN(2) == 0)
		return fillTracking(trackedMax, time.Duration(w.rng.IntN(3000))*time.Millisecond)
	}},
}

// fillTracking sets the limit in a file to 1 for some time. It does nothing while that is in effect.
func fillTracking(file string, d time.Duration) (string, error) {
	const full = "1\n"
	before, err := os.ReadFile(file)
	if err != nil || string(before) == full {
		return "still", err
	}
	time.AfterFunc(d, func() { os.WriteFile(file, before, 0) })
	return fmt.Sprint(d), os.WriteFile(file, []byte(full), 0)
}

const trackedMax = "/proc/sys/net/netfilter/nf_conntrack_max"
