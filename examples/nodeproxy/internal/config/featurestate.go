package config

import (
	"maps"
	"slices"
)

// Feature is the state of a feature gate.
type Feature struct {
	Name string
	// Stage is "ALPHA", "BETA", or "" for a gate that is generally available or whose
	// stage is not known.
	Stage   string
	Enabled bool
}

// stages returns the stages, as of Kubernetes 1.37, of gates that are not generally
// available.
func stages() map[string]string {
	return map[string]string{
		"AllAlpha": "ALPHA", "LoggingAlphaOptions": "ALPHA", "KubeProxyNFTablesLocalhostNodePorts": "ALPHA",
		"AllBeta": "BETA", "LoggingBetaOptions": "BETA",
	}
}

// Features returns the states of the gates whose feature the agent has or lacks, and of
// those that the configuration sets, sorted by name.
func (c *Config) Features() []Feature {
	enabled := gates()
	maps.Copy(enabled, c.Effective.FeatureGates)
	stage := stages()
	out := make([]Feature, 0, len(enabled))
	for _, name := range slices.Sorted(maps.Keys(enabled)) {
		out = append(out, Feature{Name: name, Stage: stage[name], Enabled: enabled[name]})
	}
	return out
}
