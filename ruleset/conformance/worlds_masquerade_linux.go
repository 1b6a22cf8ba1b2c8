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
				runScript(w, "set web cluster=1 endpoints=pod1,remote1\nsync")
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
				runScript(w, "check pod3 -> cluster1:80 = pod1 remote1")
			}),
		},
	}
}
