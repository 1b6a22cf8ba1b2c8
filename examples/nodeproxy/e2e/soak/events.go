//go:build linux

package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"
)

// event is one kind of change in a cluster, or of interference by other programs.
type event struct {
	name   string
	weight int
	// modes holds the letters of the modes in which the event happens; all if empty.
	modes string
	// begins returns a description of one event and a function that makes it. The
	// function returns when all changes are committed; the caller waits until they are
	// in effect.
	begins func(s *soak) (detail string, do func(context.Context) error)
	// kills reports that the event ends the agent's process. There are no such events in
	// the last part of a run, so the last agent has lived for long when its memory is
	// measured.
	kills bool
	// outage reports that the event removes rules, which the agent must repair.
	outage bool
}

// lastPart is the part of a run in which the agent is not killed.
const lastPart = 0.4

// allEvents holds every event.
var allEvents = []event{
	{name: "rollout", weight: 20, begins: (*soak).rollout},
	{name: "scale-up", weight: 8, begins: (*soak).scaleUp},
	{name: "scale-down", weight: 8, begins: (*soak).scaleDown},
	{name: "scale to zero", weight: 4, begins: (*soak).scaleToZero},
	{name: "node reboot", weight: 4, begins: (*soak).nodeReboot},
	{name: "Service churn", weight: 12, begins: (*soak).churn},
	{name: "Service edit", weight: 10, begins: (*soak).edit},
	{name: "slices move", weight: 4, begins: (*soak).moveSlices},
	{name: "source away", weight: 3, begins: (*soak).sourceAway},
	{name: "SIGKILL", weight: 8, kills: true, begins: (*soak).kill},
	{name: "upgrade", weight: 3, kills: true, begins: (*soak).upgrade},
	{name: "agent away", weight: 3, kills: true, begins: (*soak).agentAway},
	{name: "others' rules", weight: 6, begins: (*soak).others},
	{name: "this node restarts", weight: 1, kills: true, outage: true, begins: (*soak).coldStart},

	{name: "nft flush ruleset", weight: 2, modes: "n", outage: true, begins: command("nft flush ruleset")},
	{name: "nft delete table", weight: 2, modes: "n", outage: true, begins: command("nft delete table ip TABLE; nft delete table ip6 TABLE")},
	{name: "nft flush table", weight: 2, modes: "n", outage: true, begins: command("nft flush table ip TABLE")},
	{name: "iptables -F", weight: 2, modes: "n", begins: command("iptables -F; iptables -t nat -F; ip6tables -F; ip6tables -t nat -F")},
	{name: "iptables -F", weight: 2, modes: "iv", outage: true, begins: command("IPTABLES -F; IP6TABLES -F")},
	{name: "iptables -t nat -F", weight: 2, modes: "iv", outage: true, begins: command("IPTABLES -t nat -F; IP6TABLES -t nat -F")},
	{name: "iptables -F -X", weight: 1, modes: "i", outage: true, begins: command(
		"IPTABLES -F; IPTABLES -X; IPTABLES -t nat -F; IPTABLES -t nat -X; IP6TABLES -F; IP6TABLES -X; IP6TABLES -t nat -F; IP6TABLES -t nat -X")},
	{name: "ipvsadm -C", weight: 2, modes: "v", outage: true, begins: command("ipvsadm -C")},
	{name: "ip link del kube-ipvs0", weight: 1, modes: "v", outage: true, begins: command("ip link del kube-ipvs0")},
	{name: "ipset flush", weight: 1, modes: "v", outage: true, begins: command("ipset flush")},
}

// letter returns the letter of the mode in event.modes.
func letter(mode string) string {
	return map[string]string{"nftables": "n", "iptables": "i", "ipvs": "v"}[mode]
}

// events runs random events until the deadline.
func (s *soak) events(ctx context.Context) error {
	begun := time.Now()
	for ctx.Err() == nil && time.Now().Before(s.deadline) {
		last := time.Since(begun) > time.Duration((1-lastPart)*float64(s.o.length))
		var list []event
		for _, e := range s.o.events {
			if strings.Contains(e.modes, letter(s.o.mode)) || e.modes == "" {
				if !(e.kills && last) && (s.o.only == "" || slices.Contains(strings.Split(s.o.only, ","), e.name)) {
					list = append(list, slices.Repeat([]event{e}, e.weight)...)
				}
			}
		}
		if len(list) == 0 {
			return fmt.Errorf("no event is left to choose from (see -only)")
		}
		if err := s.happen(ctx, list[s.rng.IntN(len(list))]); err != nil {
			return err
		}
		sleep(ctx, time.Duration(s.rng.Int64N(int64(2*s.o.pause)+1)))
	}
	return ctx.Err()
}

// happen makes an event, waits until it is in effect, and judges some connections.
func (s *soak) happen(ctx context.Context, e event) error {
	detail, do := e.begins(s)
	before := s.net.drops()
	s.dropped.Store(&before)
	s.rec.begin(e.name, detail)
	over := func() {}
	if e.outage {
		over = s.rec.outage("while rules were missing: " + e.name)
	}
	defer over()
	if err := do(ctx); err != nil {
		return fmt.Errorf("%s: %w", e.name, err)
	}
	done := time.Now()
	wait := s.barrier
	if e.outage {
		wait = s.repaired
	}
	if err := wait(ctx); err != nil {
		return fmt.Errorf("%s: %w", e.name, err)
	}
	s.rec.end(e.name, time.Since(done))
	over()
	return s.judge(ctx, judgedEach)
}

// edited returns copies of random Services for which ok reports true.
func (s *soak) edited(most int, ok func(*service) bool) []*service {
	var out []*service
	for _, svc := range s.pop.pick(1 + s.rng.IntN(most)) {
		if ok(svc) {
			out = append(out, svc.clone())
		}
	}
	return out
}

func idsOf(list []*service) map[int]bool {
	out := map[int]bool{}
	for _, svc := range list {
		out[svc.id] = true
	}
	return out
}

func names(list []*service) string {
	var out []string
	for _, svc := range list {
		out = append(out, fmt.Sprintf("%s (%d endpoints)", svc.name(), len(svc.endpoints)))
	}
	return strings.Join(out, ", ")
}

// step edits a copy of each Service and commits the copies.
func (s *soak) step(ctx context.Context, list []*service, edit func(*service)) error {
	for i := range list {
		list[i] = list[i].clone()
		edit(list[i])
	}
	return s.set(ctx, list...)
}

// retire removes the terminating endpoints. Their connections are closed first, as a pod
// does when it ends.
func (s *soak) retire(ctx context.Context, list []*service) error {
	if err := s.barrier(ctx); err != nil {
		return err
	}
	removed := map[int]map[netip.AddrPort]bool{}
	for _, svc := range list {
		removed[svc.id] = map[netip.AddrPort]bool{}
		for _, e := range svc.endpoints {
			if e.state != ready {
				for f := range families {
					removed[svc.id][netip.AddrPortFrom(podAddr(e.pod, f), podPort)] = true
				}
			}
		}
	}
	s.traffic.drain(idsOf(list), func(id int, server netip.AddrPort) bool { return removed[id][server] })
	return s.step(ctx, list, func(svc *service) {
		svc.endpoints = slices.DeleteFunc(svc.endpoints, func(e endpoint) bool { return e.state != ready })
	})
}

// rollout replaces the endpoints of some Services, a quarter at a time: new endpoints are
// added, and old ones terminate and are removed.
func (s *soak) rollout() (string, func(context.Context) error) {
	list := s.edited(20, func(svc *service) bool { return len(svc.endpoints) > 0 })
	return names(list), func(ctx context.Context) error {
		old := map[int]int{}
		for _, svc := range list {
			old[svc.id] = len(svc.endpoints)
		}
		for left := 4; left > 0; left-- {
			size := func(svc *service) int { return (old[svc.id] + left - 1) / left }
			if err := s.step(ctx, list, func(svc *service) { s.pop.resize(svc, len(svc.endpoints)+size(svc)) }); err != nil {
				return err
			}
			sleep(ctx, time.Duration(s.rng.IntN(100))*time.Millisecond)
			if err := s.step(ctx, list, func(svc *service) {
				for i := range size(svc) {
					svc.endpoints[i].state = terminating
				}
			}); err != nil {
				return err
			}
			if err := s.retire(ctx, list); err != nil {
				return err
			}
			for _, svc := range list {
				old[svc.id] -= size(svc)
			}
		}
		return nil
	}
}

func (s *soak) scaleUp() (string, func(context.Context) error) {
	list := s.edited(20, func(*service) bool { return true })
	return names(list), func(ctx context.Context) error {
		return s.step(ctx, list, func(svc *service) { s.pop.resize(svc, len(svc.endpoints)+1+s.rng.IntN(2*s.o.endpoints)) })
	}
}

func (s *soak) scaleDown() (string, func(context.Context) error) {
	list := s.edited(20, func(svc *service) bool { return len(svc.endpoints) > 1 })
	return names(list), func(ctx context.Context) error {
		if err := s.step(ctx, list, func(svc *service) {
			for i := 1 + s.rng.IntN(len(svc.endpoints)-1); i < len(svc.endpoints); i++ {
				svc.endpoints[i].state = terminating
			}
		}); err != nil {
			return err
		}
		return s.retire(ctx, list)
	}
}

// scaleToZero removes all endpoints of some Services and adds others later.
func (s *soak) scaleToZero() (string, func(context.Context) error) {
	list := s.edited(5, func(svc *service) bool { return len(svc.endpoints) > 0 })
	return names(list), func(ctx context.Context) error {
		if err := s.step(ctx, list, func(svc *service) {
			for i := range svc.endpoints {
				svc.endpoints[i].state = terminating
			}
		}); err != nil {
			return err
		}
		if err := s.retire(ctx, list); err != nil {
			return err
		}
		if err := s.barrier(ctx); err != nil {
			return err
		}
		if err := s.judge(ctx, judgedEach); err != nil {
			return err
		}
		return s.step(ctx, list, func(svc *service) { s.pop.resize(svc, 1+s.rng.IntN(2*s.o.endpoints)) })
	}
}

// nodeReboot makes all pods of another node not ready, and ready again later.
func (s *soak) nodeReboot() (string, func(context.Context) error) {
	first := localPods + s.rng.IntN(farPods/nodePods)*nodePods
	node := nodeOf(first)
	var list []*service
	for _, id := range s.pop.ids {
		if svc := s.pop.now[id]; slices.ContainsFunc(svc.endpoints, func(e endpoint) bool { return nodeOf(e.pod) == node }) {
			list = append(list, svc)
		}
	}
	return fmt.Sprintf("%s, with endpoints of %d Services", node, len(list)), func(ctx context.Context) error {
		on := func(to state) func(*service) {
			return func(svc *service) {
				for i, e := range svc.endpoints {
					if nodeOf(e.pod) == node {
						svc.endpoints[i].state = to
					}
				}
			}
		}
		dead := map[netip.AddrPort]bool{}
		for pod := first; pod < first+nodePods; pod++ {
			for f := range families {
				dead[netip.AddrPortFrom(podAddr(pod, f), podPort)] = true
			}
		}
		s.traffic.drain(idsOf(list), func(_ int, server netip.AddrPort) bool { return dead[server] })
		if err := s.step(ctx, list, on(notReady)); err != nil {
			return err
		}
		sleep(ctx, time.Duration(s.rng.IntN(2000))*time.Millisecond)
		return s.step(ctx, list, on(ready))
	}
}

// churn deletes Services and creates others, which may get their addresses and ports.
func (s *soak) churn() (string, func(context.Context) error) {
	list := s.pop.pick(1 + s.rng.IntN(50))
	return names(list), func(ctx context.Context) error {
		var gone []change
		for _, svc := range list {
			gone = append(gone, change{svc, nil})
		}
		s.traffic.drain(idsOf(list), nil)
		if err := s.commit(ctx, gone...); err != nil {
			return err
		}
		var fresh []*service
		for range list {
			fresh = append(fresh, s.pop.create())
		}
		return s.set(ctx, fresh...)
	}
}

// edit changes a property of some Services.
func (s *soak) edit() (string, func(context.Context) error) {
	list := s.edited(20, func(*service) bool { return true })
	var what []string
	for _, svc := range list {
		e := []string{"port", "affinity", "type", "internal policy", "UDP"}[s.rng.IntN(5)]
		switch e {
		case "port":
			svc.port = int32(80 + s.rng.IntN(20))
		case "affinity":
			svc.affinity = !svc.affinity
		case "type":
			s.pop.setKind(svc, kind(s.rng.IntN(int(kinds))))
		case "internal policy":
			svc.internalLocal = !svc.internalLocal
		case "UDP":
			svc.udp = !svc.udp
			s.pop.setKind(svc, svc.kind)
		}
		what = append(what, fmt.Sprintf("%s of %s", e, svc.name()))
	}
	return strings.Join(what, ", "), func(ctx context.Context) error {
		return s.set(ctx, list...)
	}
}

// moveSlices moves endpoints between the slices of a Service. For a moment they are in both.
func (s *soak) moveSlices() (string, func(context.Context) error) {
	list := s.edited(20, func(*service) bool { return true })
	return names(list), func(ctx context.Context) error {
		to := map[int]split{}
		if err := s.step(ctx, list, func(svc *service) {
			to[svc.id] = halved - svc.split // whole and halved change places
			svc.split = copied
		}); err != nil {
			return err
		}
		sleep(ctx, time.Duration(s.rng.IntN(300))*time.Millisecond)
		return s.step(ctx, list, func(svc *service) { svc.split = to[svc.id] })
	}
}

// sourceAway kills the API server and starts it again, or renames the folder for a while.
func (s *soak) sourceAway() (string, func(context.Context) error) {
	d := time.Duration(s.rng.IntN(4000)) * time.Millisecond
	return d.String(), func(ctx context.Context) error { return s.src.interrupt(ctx, d) }
}

// kill kills the agent while it applies changes, and starts another.
func (s *soak) kill() (string, func(context.Context) error) {
	list := s.edited(50, func(*service) bool { return true })
	after, down := time.Duration(s.rng.IntN(1500))*time.Millisecond, time.Duration(s.rng.IntN(2000))*time.Millisecond
	return fmt.Sprintf("%v after %d Services were scaled up, for %v", after, len(list), down), func(ctx context.Context) error {
		if err := s.step(ctx, list, func(svc *service) { s.pop.resize(svc, len(svc.endpoints)+1) }); err != nil {
			return err
		}
		sleep(ctx, after)
		s.agent.stop(syscall.SIGKILL)
		sleep(ctx, down)
		if err := s.agent.start(); err != nil {
			return err
		}
		if s.rng.IntN(3) != 0 {
			return nil
		}
		// Once more, while it starts.
		sleep(ctx, after)
		s.agent.stop(syscall.SIGKILL)
		return s.agent.start()
	}
}

// upgrade stops the agent and starts another at once.
func (s *soak) upgrade() (string, func(context.Context) error) {
	return "", func(context.Context) error {
		s.agent.stop(syscall.SIGTERM)
		return s.agent.start()
	}
}

// agentAway changes Services while no agent runs.
func (s *soak) agentAway() (string, func(context.Context) error) {
	list := s.edited(50, func(*service) bool { return true })
	return fmt.Sprintf("while %d Services are scaled", len(list)), func(ctx context.Context) error {
		s.agent.stop(syscall.SIGKILL)
		if err := s.step(ctx, list, func(svc *service) { s.pop.resize(svc, len(svc.endpoints)+1+s.rng.IntN(5)) }); err != nil {
			return err
		}
		if s.rng.IntN(2) == 0 {
			if err := s.src.interrupt(ctx, time.Second); err != nil {
				return err
			}
		}
		return s.agent.start()
	}
}

// coldStart imitates a restart of this node: it removes all rules of the agent.
func (s *soak) coldStart() (string, func(context.Context) error) {
	return "", func(context.Context) error {
		s.agent.stop(syscall.SIGKILL)
		if err := s.agent.cleanup(); err != nil {
			return err
		}
		return s.agent.start()
	}
}

// othersRules holds pairs of commands that add and remove rules as other programs do.
var othersRules = [][2]string{
	{
		"nft add table inet others; nft add chain inet others pre {type nat hook prerouting priority -150;}; " +
			"nft add rule inet others pre ip daddr 203.0.113.9 dnat ip to 203.0.113.10; nft add chain inet others transit {type filter hook forward priority 10;}; " +
			"nft add rule inet others transit ip daddr 203.0.113.9 drop; nft add set inet others blocked {type ipv4_addr;}; nft add element inet others blocked {203.0.113.1,203.0.113.2}",
		"nft delete table inet others",
	},
	{
		"iptables-nft -t nat -N OTHERS; iptables-nft -t nat -I PREROUTING -d 203.0.113.9 -j OTHERS; iptables-nft -A FORWARD -d 203.0.113.9 -j DROP",
		"iptables-nft -t nat -D PREROUTING -d 203.0.113.9 -j OTHERS; iptables-nft -t nat -X OTHERS; iptables-nft -D FORWARD -d 203.0.113.9 -j DROP",
	},
	{
		"iptables-legacy -t nat -N OTHERS; iptables-legacy -t nat -I PREROUTING -d 203.0.113.9 -j OTHERS; iptables-legacy -A FORWARD -d 203.0.113.9 -j DROP",
		"iptables-legacy -t nat -D PREROUTING -d 203.0.113.9 -j OTHERS; iptables-legacy -t nat -X OTHERS; iptables-legacy -D FORWARD -d 203.0.113.9 -j DROP",
	},
	{
		"iptables -t mangle -I PREROUTING -d 203.0.113.9 -j MARK --set-mark 7; ip6tables -t raw -A PREROUTING -d 2001:db8:9::9 -j ACCEPT",
		"iptables -t mangle -D PREROUTING -d 203.0.113.9 -j MARK --set-mark 7; ip6tables -t raw -D PREROUTING -d 2001:db8:9::9 -j ACCEPT",
	},
}

// others adds rules of other programs and removes them later.
func (s *soak) others() (string, func(context.Context) error) {
	r := othersRules[s.rng.IntN(len(othersRules))]
	d := time.Duration(s.rng.IntN(2000)) * time.Millisecond
	return r[0], func(ctx context.Context) error {
		if err := s.commands(r[0]); err != nil {
			return err
		}
		sleep(ctx, d)
		if err := s.barrier(ctx); err != nil {
			return err
		}
		if err := s.judge(ctx, judgedEach); err != nil {
			return err
		}
		return s.commands(r[1])
	}
}

// command returns the begins of an event in which another process runs programs.
func command(text string) func(*soak) (string, func(context.Context) error) {
	return func(s *soak) (string, func(context.Context) error) {
		return text, func(context.Context) error { return s.commands(text) }
	}
}

// commands runs commands on the node, which "; " separates. IPTABLES stands for the
// agent's iptables. TABLE, at the end of a command of nft, stands for each of the agent's
// tables in the family: there may be none, or two while the agent swaps them.
func (s *soak) commands(text string) error {
	flavour := ""
	if s.o.iptables != "" {
		flavour = "-" + s.o.iptables
	}
	text = strings.NewReplacer("IP6TABLES", "ip6tables"+flavour, "IPTABLES", "iptables"+flavour).Replace(text)
	for c := range strings.SplitSeq(text, "; ") {
		name, rest, _ := strings.Cut(c, " ")
		args := strings.Fields(rest)
		if before, ok := strings.CutSuffix(rest, " TABLE"); ok {
			if err := s.toTables(before); err != nil {
				return err
			}
			continue
		}
		if name == "nft" { // it accepts its command as one argument
			args = []string{rest}
		}
		// iptables-nft cannot delete 100,000 chains in one transaction.
		if out, err := s.net.node.Output(name, args...); err != nil && !strings.Contains(err.Error(), "Message too long") {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}

// toTables runs a command of nft, such as "flush table ip", with each of the agent's tables in
// the family that ends the command.
func (s *soak) toTables(command string) error {
	family := command[strings.LastIndexByte(command, ' ')+1:]
	list, err := s.net.node.Output("nft", "list tables "+family)
	if err != nil {
		return err
	}
	for line := range strings.Lines(list) {
		table := strings.TrimPrefix(strings.TrimSpace(line), "table "+family+" ")
		if !strings.HasPrefix(table, "proxier") {
			continue
		}
		// The agent may delete the table at the same time.
		if out, err := s.net.node.Output("nft", command+" "+table); err != nil && !strings.Contains(err.Error()+out, "No such file") {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}
