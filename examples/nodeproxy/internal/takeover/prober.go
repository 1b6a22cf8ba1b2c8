package takeover

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"
)

// InstanceHeader is the header by which answers of nodeproxy differ from kube-proxy's. Its
// value is chosen at random by each process.
const InstanceHeader = "Nodeproxy-Instance"

// probeTimeout bounds one request.
const probeTimeout = 500 * time.Millisecond

// maxAnswer is the longest answer that is read, in bytes.
const maxAnswer = 4096

// Prober asks the servers of other proxies in the network namespace for their mode. It is not
// safe for concurrent use.
type Prober struct {
	// Own is the value of this process's InstanceHeader.
	Own string
	// Metrics and Healthz hold the addresses to ask, host:port.
	Metrics, Healthz []string
	// Skip, if not nil, reports that an address is this process's own and must not be asked.
	Skip func(addr string) bool

	last map[string][]Kind
}

// DefaultAddresses returns the loopback addresses where proxies serve their metrics and their
// health check by default.
func DefaultAddresses() (metrics, healthz []string) {
	return []string{"127.0.0.1:10249", "[::1]:10249"}, []string{"127.0.0.1:10256", "[::1]:10256"}
}

// Look returns the kinds of rules whose owners answer now. A proxy that does not report its
// mode counts for all modes. An address that does not answer in time keeps its last answer.
func (p *Prober) Look(ctx context.Context) []Kind {
	now := map[string][]Kind{}
	c := &http.Client{
		Timeout:       probeTimeout,
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	var out []Kind
	for _, a := range p.Metrics {
		now[a] = p.ask(ctx, c, a, "/proxyMode", modeOf)
		out = append(out, now[a]...)
	}
	known := map[Owner]bool{}
	for _, k := range out {
		known[k.Owner] = true
	}
	for _, a := range p.Healthz {
		now[a] = p.ask(ctx, c, a, "/healthz", anyMode)
		for _, k := range now[a] {
			if !known[k.Owner] {
				out = append(out, k)
			}
		}
	}
	p.last = now
	slices.SortFunc(out, func(a, b Kind) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(out)
}

// ask returns the kinds that an answer tells. An answer of another program, or of this process,
// tells none.
func (p *Prober) ask(ctx context.Context, c *http.Client, addr, path string, read func(body string) []string) []Kind {
	if p.Skip != nil && p.Skip(addr) {
		return nil
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return nil
	}
	answer, err := c.Do(r)
	if err != nil {
		var timeout net.Error
		if !errors.Is(err, syscall.ECONNREFUSED) && errors.As(err, &timeout) && timeout.Timeout() {
			return p.last[addr]
		}
		return nil
	}
	defer answer.Body.Close()
	instance := answer.Header.Get(InstanceHeader)
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil || instance == p.Own && instance != "" {
		return nil
	}
	owner := KubeProxy
	if instance != "" {
		owner = Nodeproxy
	}
	var out []Kind
	for _, m := range read(string(body)) {
		out = append(out, Kind{owner, m})
	}
	return out
}

// modeOf reads an answer of /proxyMode.
func modeOf(body string) []string {
	if m := strings.TrimSpace(body); slices.Contains(modes, m) {
		return []string{m}
	}
	return nil
}

// anyMode reads an answer of a proxy's /healthz, of whatever status.
func anyMode(body string) []string {
	if strings.Contains(body, `"lastUpdated"`) && strings.Contains(body, `"currentTime"`) {
		return modes
	}
	return nil
}
