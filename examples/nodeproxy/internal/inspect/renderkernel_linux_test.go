package inspect

import (
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestRenderComparesWithTheKernel applies the demo's manifests in each mode and compares them, and others,
// with the rules in the kernel.
func TestRenderComparesWithTheKernel(t *testing.T) {
	families := []tracker.Family{tracker.IPv4, tracker.IPv6}
	without := edited(t, "endpoints-web.yaml", "- {addresses: [10.1.1.3], nodeName: node-1} # pod-2\n", "")
	// The longest names that an API server accepts, and the shortest port.
	long := edited(t, "services.yaml", "{name: empty, namespace: shop}", "{name: "+strings.Repeat("e", 63)+", namespace: "+strings.Repeat("s", 63)+"}")
	renamed := edited(t, "services.yaml", "{name: web, namespace: shop}", "{name: shop-front, namespace: shop}")
	for _, m := range []modes.Mode{modes.NFTables(), modes.IPTables()} {
		t.Run(m.Name, func(t *testing.T) {
			t.Parallel()
			if m.Name == config.ModeIPTables {
				netlab.NeedPrograms(t, "iptables-restore", "iptables-save", "ip6tables-restore", "ip6tables-save")
			}
			h := netlab.NewHost(t)
			compare := func(world string) (got string, err error) {
				do := h.Do(func() error {
					got, err = rendered(t, "--manifests", world, "--proxy-mode", m.Name, "--iptables-localhost-nodeports=false", "--diff", "kernel")
					return nil
				})
				if do != nil {
					t.Fatal(do)
				}
				return got, err
			}
			if got, err := compare(demoWorld); err == nil {
				t.Errorf("a kernel without rules agrees:\n%s", got)
			}
			for _, world := range []string{long, demoWorld} {
				args := []string{"run", "--manifests", world, "--hostname-override", "node-1", "--proxy-mode", m.Name}
				if m.Name == config.ModeIPTables {
					args = append(args, "--iptables-localhost-nodeports=false")
				}
				cfg := configtest.Parsed(t, args)
				must.Do(t, h.Do(func() error {
					p, err := m.Open(t.Context(), modes.Settings{Config: cfg, Families: families, Rules: func(tracker.Family, string, int, int) {}})
					if err != nil {
						return err
					}
					defer p.Close()
					s, err := snapshot(t.Context(), cfg, slog.New(slog.DiscardHandler))
					if err != nil {
						return err
					}
					return p.Apply(t.Context(), s.Delta())
				}))
				if got, err := compare(world); got != "" || err != nil {
					t.Errorf("the same objects: %v\n%s", err, got)
				}
			}
			got, err := compare(without)
			lines := slices.Collect(strings.Lines(got))
			if err != cli.StatusError(1) || len(lines) == 0 || !strings.HasPrefix(lines[0], "~shop/web:http/TCP/IPv4 10.96.0.10:80: forward") || !strings.Contains(got, "kernel: endpoint 10.1.1.3:8080") {
				t.Errorf("one endpoint more in the kernel: %v\n%s", err, got)
			}
			if strings.Contains(got, "IPv6") {
				t.Errorf("the other family differs, too:\n%s", got)
			}
			got, err = compare(renamed)
			if err != cli.StatusError(1) || !strings.Contains(got, "~shop/shop-front:http/TCP/IPv4 10.96.0.10:80") || !strings.Contains(got, ", for shop/web:http\n") {
				t.Errorf("another name: %v\n%s", err, got)
			}
			if m.Name == config.ModeNFTables && !strings.Contains(got, "\n-shop/web:http") {
				t.Errorf("the Service of the kernel alone is missing:\n%s", got)
			}
		})
	}
}
