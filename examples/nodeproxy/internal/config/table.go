package config

import (
	"fmt"
	"slices"
	"strings"
)

// KubeProxyTable is when the agent keeps a table named like that of kube-proxy's nftables mode,
// with one empty chain, for programs that look for it. It is a flag's value. The zero value is
// TableAdopted.
type KubeProxyTable string

// The values of KubeProxyTable.
const (
	// TableAdopted keeps it once the agent has taken over from kube-proxy's nftables mode.
	TableAdopted KubeProxyTable = ""
	TableAlways  KubeProxyTable = "always"
	TableNever   KubeProxyTable = "never"
)

const adopted = "adopted" // the name of TableAdopted

// String returns the name of the value.
func (t *KubeProxyTable) String() string {
	if *t == TableAdopted {
		return adopted
	}
	return string(*t)
}

// Set sets the value by its name.
func (t *KubeProxyTable) Set(name string) error {
	names := []string{adopted, string(TableAlways), string(TableNever)}
	switch {
	case !slices.Contains(names, name):
		return fmt.Errorf("must be one of %s", strings.Join(names, ", "))
	case name == adopted:
		*t = TableAdopted
	default:
		*t = KubeProxyTable(name)
	}
	return nil
}

// Type is the name of the type in the help text.
func (t *KubeProxyTable) Type() string { return "when" }
