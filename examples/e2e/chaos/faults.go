//go:build linux

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
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
	// agent has repaired the rules. restores: another program has restored an old state.
	kills effect = 1 << iota
	outage
	restores
	none effect = 0
)

// shell returns a fault that runs a shell command on the node. In the command, ARG is one of args, FAMILY is ip
// or ip6, IPTABLES is iptables or ip6tables in the mode's flavor, and NUMBER is a random number. The command may fail,
// for example because what it deletes does not exist.
func shell(name string, e effect, command string, args ...string) fault {
	return fault{name, e, func(w *world) (string, error) {
		text := command
		if len(args) != 0 {
			text = strings.ReplaceAll(text, "ARG", pick(w.rng, args...))
		}
		text = strings.NewReplacer("FAMILY", pick(w.rng, "ip", "ip6"), "NUMBER", fmt.Sprint(w.rng.IntN(1000)),
			"IPTABLES", pick(w.rng, "iptables", "ip6tables")+w.mode.flavor).Replace(text)
		out, err := w.node.sh(text)
		if err != nil {
			out += err.Error()
		}
		return text + ": " + out, nil
	}}
}

// toggle returns a fault that adds or removes an address or a link.
func toggle(name string, what ...string) fault {
	return fault{name, none, func(w *world) (string, error) {
		x := pick(w.rng, what...)
		return x, w.toggle(x)
	}}
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
		p := w.agent.Process
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
	toggle("address", otherAddr4+"/24", otherAddr6+"/64", "10.96.0.3/32"),
	toggle("interface", "veth0", "veth1", "other0"),
	// Rules as other programs add and remove them.
	shell("others' rules", none, "ARG",
		`nft 'add table inet others; add chain inet others pre {type nat hook prerouting priority -150;};
			add rule inet others pre ip daddr 203.0.113.99 dnat ip to 203.0.113.98; add chain inet others transit {type filter hook forward priority 10;};
			add rule inet others transit ip daddr 203.0.113.99 drop'; sleep 0.1NUMBER; nft delete table inet others`,
		`nft 'add table ip proxiers; add chain ip proxiers c { type nat hook prerouting priority -100; };
			add rule ip proxiers c counter'; sleep 0.1NUMBER; nft delete table ip proxiers`,
		`IPTABLES -t nat -N OTHERS; IPTABLES -t nat -I PREROUTING -p udp --dport 9 -j OTHERS; IPTABLES -A FORWARD -p udp --dport 9 -j DROP; sleep 0.1NUMBER;
			IPTABLES -t nat -D PREROUTING -p udp --dport 9 -j OTHERS; IPTABLES -t nat -X OTHERS; IPTABLES -D FORWARD -p udp --dport 9 -j DROP`),
	{"node restarts", kills | outage, func(w *world) (string, error) { return "", w.restart(syscall.SIGKILL, w.cleanUp) }},
}

// oneLine is a filter that passes on one random line.
const oneLine = `awk -v n=NUMBER '{line[k++] = $0} END {if (k) print line[n % k]}'`

// nftFaults damage the tables of mode nftables.
var nftFaults = []fault{
	shell("flush ruleset", outage, "nft flush ruleset"),
	shell("delete table", outage, "nft delete table FAMILY proxier"),
	shell("flush set", outage, "nft flush set FAMILY proxier ARG || nft flush map FAMILY proxier ARG",
		"service-ips", "tcp-endpoints", "service-nodeports", "handlers", "sticky-endpoints", "cluster-ips", "hairpin-connections", "nodeport-ips", "internal-service-ips"),
	shell("flush chain", outage, "nft flush chain FAMILY proxier ARG",
		"services", "masquerading", "nat-output", "filter-forward", "firewall-check", "pool-1", "pool-2", "cluster-ip-1"),
	shell("delete element", outage, `element=$( { nft -s list set FAMILY proxier ARG || nft -s list map FAMILY proxier ARG; } |
		tr '\n' ' ' | sed 's/ comment "[^"]*"//g' | sed -n 's/.*elements = {\([^}]*\)}.*/\1/p' | tr ',' '\n' | sed 's/ : .*//' | `+oneLine+`)
		echo "$element"; nft delete element FAMILY proxier ARG "{ $element }"`,
		"service-ips", "tcp-endpoints", "service-nodeports", "cluster-ips"),
	shell("insert rule", none, "nft insert rule FAMILY proxier services counter"),
	shell("iptables -F", none, "iptables -F; iptables -t nat -F; ip6tables -F; ip6tables -t nat -F"),
}

// offloadFaults damage the flowtable.
var offloadFaults = []fault{
	shell("delete rules of the flowtable", none, "nft flush chain FAMILY proxier to-fast-path"),
	toggle("interface", "veth0", "veth1", "veth2", "veth3"),
}

// rulesFaults damage the rules of modes iptables and ipvs.
var rulesFaults = []fault{
	shell("flush nat", outage, "IPTABLES -t nat -F"),
	shell("flush filter", outage, "IPTABLES -F"),
}

// iptablesFaults damage the rules of mode iptables. The rules that "delete rule" deletes exist without any Service.
var iptablesFaults = append(rulesFaults,
	shell("flush both", outage, "IPTABLES -t nat -F; IPTABLES -F"),
	shell("restore an old state", outage|restores, `s=$(IPTABLES-save); sleep 0.1; printf '%s\n' "$s" | IPTABLES-restore`),
	shell("delete rule", outage, `rule=$(IPTABLES-save -t ARG |
		grep -E '^-A (KUBE-POSTROUTING|KUBE-MARK-MASQ|KUBE-FORWARD|KUBE-SERVICES|KUBE-NODEPORTS|PREROUTING|OUTPUT|POSTROUTING|INPUT|FORWARD) ' |
		sed 's/^-A/-D/' | `+oneLine+`); echo "$rule"; echo "$rule" | xargs -r IPTABLES -t ARG`, "nat", "filter"))

// ipvsFaults damage the virtual servers, sets, addresses and rules of mode ipvs.
var ipvsFaults = append(rulesFaults,
	shell("clear virtual servers", outage, "ipvsadm -C"),
	shell("flush addresses", outage, "ip addr flush dev kube-ipvs0"),
	shell("delete device", outage, "ip link del kube-ipvs0"),
	shell("flush set", outage, "ipset flush ARG",
		"KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-EXTERNAL-IP", "KUBE-NODE-PORT-TCP", "KUBE-LOAD-BALANCER"),
	shell("delete server", outage, `ipvsadm -Sn | awk '$1=="-A"{print $2, $3; exit}' | xargs -r ipvsadm -D`))

// socketFaults damage the maps and links of the socket programs.
var socketFaults = []fault{
	{"delete a file", none, func(w *world) (string, error) {
		files, _ := filepath.Glob(filepath.Join(w.bpf, pinned, "*"))
		if len(files) == 0 {
			return "no file", nil
		}
		f := pick(w.rng, files...)
		return filepath.Base(f), os.Remove(f)
	}},
	{"delete all files", none, func(w *world) (string, error) { return "", os.RemoveAll(filepath.Join(w.bpf, pinned)) }},
	{"delete an entry", none, func(w *world) (string, error) {
		name := pick(w.rng, "frontends", "endpoints", "members", "addresses") // the maps whose entries the objects determine
		table, err := ebpf.LoadPinnedMap(filepath.Join(w.bpf, pinned, name), nil)
		if err != nil {
			return "no map", nil
		}
		defer table.Close()
		key, err := table.NextKeyBytes(nil)
		if err != nil || key == nil {
			return "no entry", err
		}
		return name, table.Delete(key)
	}},
}

// inMachine reports whether this process runs in a virtual machine of package internal/testing/vm.
func inMachine() bool { return os.Getenv("PROXIER_VM_INSIDE") != "" }

// machineFaults affect the whole machine, so that only virtual machines get them.
var machineFaults = []fault{
	{"clock", none, func(w *world) (string, error) {
		by := time.Duration(w.rng.IntN(96)-48) * time.Hour
		ts, err := unix.TimeToTimespec(time.Now().Add(by))
		return by.String(), errors.Join(err, unix.ClockSettime(unix.CLOCK_REALTIME, &ts))
	}},
	{"full connection tracking", outage, func(w *world) (string, error) {
		// The agent's connections to the API server are tracked, too.
		w.server.endWatches(w.rng.IntN(2) == 0)
		return fillTracking("/proc/sys/net/netfilter/nf_conntrack_max", time.Duration(w.rng.IntN(3000))*time.Millisecond)
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
