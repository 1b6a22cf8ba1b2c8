package conformance

import (
	"time"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
)

// bridgeWorlds returns worlds about pods on a bridge.
func bridgeWorlds() []world {
	return []world{
		{
			name: "neighbors on a bridge", needs: []Feature{InterfaceDetection},
			config: config{bridge: true, localTraffic: &ruleset.LocalTraffic{Bridge: bridgeName}}, run: packets(func(w *World) {
				w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on("pod1", "remote1")})
				w.Sync()
				// When pod1 sends on an established connection, the node may send it
				// a redirect to its neighbor pod3.
				for _, f := range w.Env.Families {
					for range 2 {
						c := w.open("pod3", clusterIP(1, 80).at(f))
						time.Sleep(1100 * time.Millisecond) // redirects are limited to one a second
						if err := c.Echo(time.Now().Add(testtime.Timeout)); err != nil {
							w.tb.Errorf("%s: %v", f, err)
						}
					}
				}
				w.check(overUDP(row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"})...)
			}),
		},
	}
}
