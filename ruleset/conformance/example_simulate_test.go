package conformance_test

import (
	"context"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// Test a vendor's backend without a kernel. The test implements the vendor's tables in
// memory: each write calls env.Fail and env.Look, and handle looks up a packet.
func ExampleSimulate() {
	_ = func(t *testing.T) { // func TestSimulation
		conformance.Simulate(t, conformance.Simulation{
			New: func(_ testing.TB, env conformance.SimEnv) conformance.Fake {
				tables := map[string]string{}
				write := func(key, value string) error {
					if err := env.Fail(); err != nil {
						return err
					}
					tables[key] = value
					env.Look()
					return nil
				}
				return conformance.Fake{
					Backend: func() ruleset.Backend {
						return ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
							return write("services", "") // what d asks for
						})
					},
					Handle: func(ruleset.Packet) conformance.Outcome {
						return conformance.Outcome{Action: ruleset.ActionPass} // what tables have for the packet
					},
				}
			},
		})
	}
}
