//go:build linux

package main

import (
	"context"
	"fmt"
	"os"
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
	// do makes the event. It returns when all changes are committed; the caller waits until
	// they are in effect.
	do func(*soak, context.Context) error
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
	{name: "rollout", weight: 20, do: (*soak).rollout},
	{name: "scale-up", weight: 8, do: (*soak).scaleUp},
	{name: "scale-down", weight: 8, do: (*soak).scaleDown},
	{name: "Service churn", weight: 12, do: (*soak).churn},
	{name: "Service edit", weight: 10, do: (*soak).edit},
	{name: "manifests away", weight: 3, do: (*soak).manifestsAway},
	{name: "agent restart", weight: 11, kills: true, do: (*soak).kill},
	{name: "others' rules", weight: 6, do: (*soak).others},
	{name: "this node restarts", weight: 1, kills: true, outage: true, do: (*soak).coldStart},

	{name: "nft flush ruleset", weight: 2, modes: "n", outage: true, do: shell("nft flush ruleset")},
	{name: "nft delete table", weight: 2, modes: "n", outage: true, do: tables("delete")},
	{name: "nft flush table", weight: 2, modes: "n", outage: true, do: tables("flush")},
	{name: "iptables -F", weight: 2, modes: "n", do: shell("iptables -F; iptables -t nat -F; ip6tables -F; ip6tables -t nat -F")},
	{name: "iptables -F", weight: 2, modes: "iv", outage: true, do: shell("iptables -F; ip6tables -F")},
	{name: "iptables -t nat -F", weight: 2, modes: "iv", outage: true, do: shell("iptables -t nat -F; ip6tables -t nat -F")},
	// iptables-nft cannot delete 100,000 chains in one transaction.
	{name: "iptables -F -X", weight: 1, modes: "i", outage: true, do: shell("for p in iptables ip6tables; do for t in filter nat; do $p -t $t -F; $p -t $t -X || true; done; done")},
	{name: "ipvsadm -C", weight: 2, modes: "v", outage: true, do: shell("ipvsadm -C")},
	{name: "ip link del kube-ipvs0", weight: 1, modes: "v", outage: true, do: shell("ip link del kube-ipvs0")},
	{name: "ipset flush", weight: 1, modes: "v", outage: true, do: shell("ipset flush")},
}

// letter returns the letter of the mode in event.modes.
func letter(mode string) string {
	return map[string]string{"nftables": "n", "iptables": "i", "ipvs": "v"}[mode]
}

// events runs random events for the length of the run.
func (s *soak) events(ctx context.Context) error {
	begun := time.Now()
	for ctx.Err() == nil && time.Since(begun) < s.o.length {
		last := time.Since(begun) > time.Duration((1-lastPart)*float64(s.o.length))
		var list []event
		for _, e := range s.o.events {
			if (e.modes == "" || strings.Contains(e.modes, letter(s.o.mode))) && !(e.kills && last) &&
				(s.o.only == "" || slices.Contains(strings.Split(s.o.only, ","), e.name)) {
				list = append(list, slices.Repeat([]event{e}, e.weight)...)
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
	s.rec.begin(e.name, e.outage)
	err := e.do(s, ctx)
	done := time.Now()
	if err == nil && e.outage {
		err = s.repaired(ctx)
	}
	if err == nil {
		err = s.barrier(ctx)
	}
	s.rec.over()
	if err != nil {
		return fmt.Errorf("%s: %w", e.name, err)
	}
	s.rec.log.Printf("in effect after %v", time.Since(done).Round(time.Millisecond))
	return s.judge(ctx)
}

// step edits a copy of each Service and commits the copies, which replace the Services in list.
func (s *soak) step(ctx context.Context, list []*service, edit func(*service)) error {
	for i := range list {
		list[i] = list[i].clone()
		edit(list[i])
	}
	return s.set(ctx, list...)
}

// replace adds endpoints to Services. Then their first endpoints terminate or become not ready, and
// when that is in effect, they are removed. The two functions return the numbers for a Service.
func (s *soak) replace(ctx context.Context, list []*service, add, remove func(*service) int) error {
	if err := s.step(ctx, list, func(svc *service) { s.pop.grow(svc, add(svc)) }); err != nil {
		return err
	}
	sleep(ctx, time.Duration(s.rng.IntN(100))*time.Millisecond)
	if err := s.step(ctx, list, func(svc *service) {
		to := []state{terminating, notReady}[s.rng.IntN(2)]
		for i := range remove(svc) {
			svc.endpoints[i].state = to
		}
	}); err != nil {
		return err
	}
	if err := s.barrier(ctx); err != nil {
		return err
	}
	return s.step(ctx, list, func(svc *service) {
		svc.endpoints = slices.DeleteFunc(svc.endpoints, func(e endpoint) bool { return e.state != ready })
	})
}

// rollout replaces the endpoints of some Services, a quarter at a time.
func (s *soak) rollout(ctx context.Context) error {
	list := s.pop.some(20)
	size := map[int]int{}
	for _, svc := range list {
		size[svc.id] = len(svc.endpoints)
	}
	for left := 4; left > 0; left-- {
		quarter := func(svc *service) int { return (size[svc.id] + left - 1) / left }
		if err := s.replace(ctx, list, quarter, quarter); err != nil {
			return err
		}
		for _, svc := range list {
			size[svc.id] -= quarter(svc)
		}
	}
	return nil
}

func (s *soak) scaleUp(ctx context.Context) error {
	return s.step(ctx, s.pop.some(20), func(svc *service) { s.pop.grow(svc, 1+s.rng.IntN(2*meanEndpoints)) })
}

// scaleDown removes some endpoints, or all.
func (s *soak) scaleDown(ctx context.Context) error {
	return s.replace(ctx, s.pop.some(20), func(*service) int { return 0 }, func(svc *service) int { return s.rng.IntN(len(svc.endpoints) + 1) })
}

// churn deletes Services and creates others, which may get their addresses and ports.
func (s *soak) churn(ctx context.Context) error {
	list := s.pop.some(50)
	var gone []change
	for _, svc := range list {
		gone = append(gone, change{svc, nil})
	}
	if err := s.commit(ctx, gone...); err != nil {
		return err
	}
	for i := range list {
		list[i] = s.pop.create()
	}
	return s.set(ctx, list...)
}

// edit changes a property of some Services.
func (s *soak) edit(ctx context.Context) error {
	return s.step(ctx, s.pop.some(20), func(svc *service) {
		what := []string{"port", "affinity", "type", "internal policy", "UDP"}[s.rng.IntN(5)]
		switch what {
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
		}
		s.rec.log.Printf("%s of %s", what, svc.name())
	})
}

// manifestsAway renames the folder of manifests for a while.
func (s *soak) manifestsAway(ctx context.Context) error {
	if err := os.Rename(s.src.dir, s.src.dir+".away"); err != nil {
		return err
	}
	sleep(ctx, time.Duration(s.rng.IntN(4000))*time.Millisecond)
	return os.Rename(s.src.dir+".away", s.src.dir)
}

// restart ends the agent with a signal, calls f and starts the agent.
func (s *soak) restart(signal syscall.Signal, f func() error) error {
	if err := s.agent.Stop(signal); err != nil {
		return err
	}
	if err := f(); err != nil {
		return err
	}
	return s.agent.Start()
}

// kill ends the agent while it applies changes, changes Services while no agent runs, and starts
// another agent, which it may kill while that starts.
func (s *soak) kill(ctx context.Context) error {
	grow := func() error { return s.step(ctx, s.pop.some(50), func(svc *service) { s.pop.grow(svc, 1) }) }
	after, signal := time.Duration(s.rng.IntN(1500))*time.Millisecond, []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[s.rng.IntN(2)]
	s.rec.log.Printf("%v after %v", signal, after)
	if err := grow(); err != nil {
		return err
	}
	sleep(ctx, after)
	if err := s.restart(signal, grow); err != nil || s.rng.IntN(3) != 0 {
		return err
	}
	sleep(ctx, after)
	return s.restart(syscall.SIGKILL, func() error { return nil })
}

// coldStart imitates a restart of this node: it removes all rules of the agent.
func (s *soak) coldStart(context.Context) error {
	return s.restart(syscall.SIGKILL, s.cleanup)
}

// othersRules holds pairs of commands that add and remove rules as other programs do.
var othersRules = [][2]string{
	{
		`nft 'add table inet others; add chain inet others pre {type nat hook prerouting priority -150;};
			add rule inet others pre ip daddr 203.0.113.9 dnat ip to 203.0.113.10; add chain inet others transit {type filter hook forward priority 10;};
			add rule inet others transit ip daddr 203.0.113.9 drop'`,
		"nft delete table inet others",
	},
	{
		"for f in nft legacy; do iptables-$f -t nat -N OTHERS; iptables-$f -t nat -I PREROUTING -d 203.0.113.9 -j OTHERS; iptables-$f -A FORWARD -d 203.0.113.9 -j DROP; done",
		"for f in nft legacy; do iptables-$f -t nat -D PREROUTING -d 203.0.113.9 -j OTHERS; iptables-$f -t nat -X OTHERS; iptables-$f -D FORWARD -d 203.0.113.9 -j DROP; done",
	},
}

// others adds rules of other programs and removes them later.
func (s *soak) others(ctx context.Context) error {
	r := othersRules[s.rng.IntN(len(othersRules))]
	if err := shell(r[0])(s, ctx); err != nil {
		return err
	}
	sleep(ctx, time.Duration(s.rng.IntN(2000))*time.Millisecond)
	if err := s.barrier(ctx); err != nil {
		return err
	}
	if err := s.judge(ctx); err != nil {
		return err
	}
	return shell(r[1])(s, ctx)
}

// shell returns what an event does in which another process runs commands on the node.
func shell(text string) func(*soak, context.Context) error {
	return func(s *soak, _ context.Context) error {
		s.rec.log.Print(text)
		_, err := s.net.node.Output("sh", "-ec", text)
		return err
	}
}

// tables returns an event's commands that flush or delete the agent's tables. The agent may delete a
// table at the same time.
func tables(verb string) func(*soak, context.Context) error {
	return shell("nft list tables | sed -n 's/^table \\(ip6* proxier\\)/" + verb + " table \\1/p' | nft -f - || true")
}
