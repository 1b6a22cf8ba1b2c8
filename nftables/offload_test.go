//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

var everyInterface = []string{"*"}

// TestOffloadIsNamedWhereMissing probes offload on the running kernel.
func TestOffloadIsNamedWhereMissing(t *testing.T) {
	t.Parallel()
	h := netlab.NewHost(t)
	c := Config{NetNS: h.File()}
	if err := Probe(t.Context(), c); err != nil {
		t.Fatalf("without offload: %v", err)
	}
	c.Offload = &Offload{Interfaces: everyInterface}
	err := Probe(t.Context(), c)
	if err == nil {
		t.Skip("this kernel has flowtables")
	}
	var missing *dataplane.UnsupportedError
	if !errors.As(err, &missing) || !strings.Contains(missing.Feature, "CONFIG_NF_FLOW_TABLE_INET") || missing.Minimum != minimumKernel {
		t.Errorf("Probe returned %v", err)
	}
}

func TestOffloadConfigIsChecked(t *testing.T) {
	t.Parallel()
	const want = "Offload.Interfaces is empty"
	if _, err := New(t.Context(), Config{Offload: &Offload{}}); !errors.Is(err, ruleset.ErrConfig) || !strings.Contains(err.Error(), want) {
		t.Errorf("New returned %v, want %q", err, want)
	}
	given := Offload{Interfaces: everyInterface}
	c, err := Config{Offload: &given}.withDefaults()
	if err != nil || c.Offload.afterPackets != defaultOffloadPackets || given.afterPackets != 0 {
		t.Errorf("defaults are %+v, %v; the caller's value is %+v", c.Offload, err, given)
	}
}

func TestInterfacesAreChosenByPatterns(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"veth[", ""} {
		if _, err := (&Offload{Interfaces: []string{"eth0", bad}}).withDefaults(); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("pattern %q: %v", bad, err)
		}
	}
	given := []string{"eth0", "veth*"}
	o := must.Get((&Offload{Interfaces: given}).withDefaults())(t)
	given[0] = "*"
	for name, want := range map[string]bool{"eth0": true, "veth": true, "veth12": true, "eth01": false, "cni0": false, "": false} {
		if o.chooses(name) != want {
			t.Errorf("%q: %v", name, !want)
		}
	}
	if o := (&Offload{Interfaces: everyInterface}); o.chooses("lo") || !o.chooses("eth0") {
		t.Error("the loopback interface is chosen, or another one is not")
	}
}

// BenchmarkOffload sends bytes from a client to a pod across a node, over one TCP connection
// each: to the pod's own address on a node without rules, to a Service, and to a Service with
// offload. They take turns of 4 MB. CPU time is the time of the whole machine, with the sender
// and the receiver. In "mtu" the sender cuts the bytes into packets. In "gso" packets have up to
// 64 kB on their way through the node.
//
// It needs a kernel with flowtables and runs in the emulated one, where only the ratios are
// meaningful:
//
//	PROXIER_VM_PROCESSORS=2 PROXIER_VM_KERNEL=$(.ci/vm-kernel) go test ./nftables -run '^$' -bench Offload -benchtime 30x
func BenchmarkOffload(b *testing.B) {
	if !vm.Inside(b, vm.Debian) {
		return
	}
	const turn = 4 << 20
	for _, size := range []string{"mtu", "gso"} {
		b.Run(size, func(b *testing.B) {
			var ways []*way
			for _, name := range []string{"direct", "service", "offload"} {
				var o *Offload
				if name == "offload" {
					o = &Offload{Interfaces: everyInterface}
				}
				f := newForwarder(b, o)
				f.serveSink()
				w := &way{name: name, forwarder: f}
				to := netip.AddrPortFrom(podAddr(tracker.IPv4, 0), sinkPort)
				if name == "direct" {
					f.must(Cleanup(b.Context(), Config{NetNS: f.host.File()}))
				} else {
					f.sinkService()
					to = clusterIP(tracker.IPv4, 80)
				}
				if size == "mtu" {
					f.must(f.client.Do(func() error {
						l, err := netlink.LinkByName("eth0")
						if err != nil {
							return err
						}
						return netlink.LinkSetGSOMaxSegs(l, 1)
					}))
				}
				w.flow = f.dial(f.client, to)
				w.send(b, turn)
				if name != "direct" {
					w.flow.expect(name == "offload")
				}
				w.took, w.cpu, w.packets = 0, 0, 0
				ways = append(ways, w)
			}
			for b.Loop() {
				for _, w := range ways {
					w.send(b, turn)
				}
			}
			for _, w := range ways {
				b.ReportMetric(float64(turn)*float64(b.N)/1e6/w.took.Seconds(), w.name+"-MB/s")
				b.ReportMetric(float64(w.cpu.Nanoseconds())/float64(w.packets), w.name+"-cpu-ns/packet")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// way is a way through a node, with its measurements.
type way struct {
	name string
	*forwarder
	flow      *flow
	took, cpu time.Duration
	packets   uint64
}

const sinkPort = 8081

// serveSink answers each amount of a turn with one byte.
func (f *forwarder) serveSink() {
	f.pods[0].ServeTCP(f, netip.AddrPortFrom(podAddr(tracker.IPv4, 0), sinkPort).String(), func(c net.Conn) {
		buf := make([]byte, 256<<10)
		for {
			var size [1]byte
			if _, err := io.ReadFull(c, size[:]); err != nil {
				return
			}
			if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.LimitReader(struct{ io.Reader }{c}, int64(size[0])<<20), buf); err != nil {
				return
			}
			if _, err := c.Write(size[:]); err != nil {
				return
			}
		}
	})
}

// sinkService makes the sink the Service's endpoint.
func (f *forwarder) sinkService() {
	es := epSlice(0, tracker.IPv4, 1)
	*es.Ports[0].Port = sinkPort
	f.tracker.SetSlice(es)
	f.sync()
}

// send sends the given number of bytes, whole MiB, and adds up time and CPU time.
func (w *way) send(b *testing.B, bytes int) {
	buf := make([]byte, 256<<10)
	packets, cpu, began := w.crossed(), busyTime(b), time.Now()
	_, err := w.flow.Write([]byte{byte(bytes >> 20)})
	for sent := 0; sent < bytes && err == nil; sent += len(buf) {
		_, err = w.flow.Write(buf)
	}
	if err == nil {
		_, err = io.ReadFull(w.flow, buf[:1])
	}
	if err != nil {
		b.Fatal(err)
	}
	w.took += time.Since(began)
	w.cpu += busyTime(b) - cpu
	w.packets += w.crossed() - packets
}

// crossed returns the number of packets that the node's interfaces have received.
func (w *way) crossed() (n uint64) {
	w.links(func(h *netlink.Handle) error {
		for _, name := range []string{"eth0", "veth1"} {
			l, err := h.LinkByName(name)
			if err != nil {
				return err
			}
			n += l.Attrs().Statistics.RxPackets
		}
		return nil
	})
	return n
}

// busyTime returns how long the machine's processors have been busy (proc(5), /proc/stat).
func busyTime(b *testing.B) time.Duration {
	text := must.Get(os.ReadFile("/proc/stat"))(b)
	var user, nice, system, idle, wait, irq, softirq int64
	must.Get(fmt.Sscanf(strings.TrimSpace(string(text)), "cpu %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &wait, &irq, &softirq))(b)
	return time.Duration(user+nice+system+irq+softirq) * (time.Second / 100)
}
