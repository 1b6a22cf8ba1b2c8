package ruleset

import (
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// diff returns the parts in which two Services of the same key differ, or FieldAll if only one of them is nil.
// Unchanged values share memory, so it compares pointers first.
func diff(a, b *Port) Field {
	if a == b {
		return 0
	}
	if a == nil || b == nil {
		return FieldAll
	}
	var f Field
	if !slices.EqualFunc(a.Frontends, b.Frontends, equalFrontends) {
		f |= FieldFrontends
	}
	if !equalEndpoints(a.Selection.Cluster, b.Selection.Cluster) {
		f |= FieldCluster
	}
	if !equalEndpoints(a.Selection.Local, b.Selection.Local) {
		f |= FieldLocal
	}
	if a.Selection.UsesCluster != b.Selection.UsesCluster || a.Selection.UsesLocal != b.Selection.UsesLocal {
		f |= FieldPools
	}
	// A Service that gave up its weights has equal endpoints.
	if a.uniform != b.uniform {
		if a.Weighted(TargetCluster) != b.Weighted(TargetCluster) {
			f |= FieldCluster
		}
		if a.Weighted(TargetLocal) != b.Weighted(TargetLocal) {
			f |= FieldLocal
		}
	}
	if a.Spec.Affinity != b.Spec.Affinity {
		f |= FieldAffinity
	}
	if a.Hash() != b.Hash() || a.Spec.HashBuckets != b.Spec.HashBuckets {
		f |= FieldHash
	}
	if !equalEndpoints(a.Endpoints, b.Endpoints) {
		f |= FieldEndpoints
	}
	if a.Spec != b.Spec && !equalExt(a.Spec.Ext, b.Spec.Ext) {
		f |= FieldExt
	}
	if !equalOther(a, b, f) {
		f |= FieldOther
	}
	return f
}

// equalOther compares the parts that FieldOther covers. found holds the other bits
// that differ.
func equalOther(a, b *Port, found Field) bool {
	if a.Selection.HasAny != b.Selection.HasAny {
		return false
	}
	if a.Spec == b.Spec {
		return true
	}
	// Frontends, affinity, hash and the extension have bits of their own.
	p := *b.Spec
	// The time of creation decides only who owns a frontend, which FieldFrontends reports.
	p.Created = a.Spec.Created
	p.Ext = a.Spec.Ext
	p.Affinity = a.Spec.Affinity
	p.Hash, p.HashBuckets = a.Spec.Hash, a.Spec.HashBuckets
	if found&FieldFrontends != 0 {
		p.ClusterIP, p.Port, p.NodePort = a.Spec.ClusterIP, a.Spec.Port, a.Spec.NodePort
		p.ExternalIPs, p.LoadBalancerIPs = a.Spec.ExternalIPs, a.Spec.LoadBalancerIPs
		p.SourceRanges, p.SourceRangesLeftOut = a.Spec.SourceRanges, a.Spec.SourceRangesLeftOut
		p.InternalLocal, p.ExternalLocal, p.PreferLocal = a.Spec.InternalLocal, a.Spec.ExternalLocal, a.Spec.PreferLocal
	}
	return a.Spec.Equal(&p)
}

func equalExt(a, b tracker.Extension) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return a.Equal(b)
}

func equalFrontends(a, b Frontend) bool {
	return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port &&
		a.Target == b.Target && a.Internal == b.Internal && a.Masquerade == b.Masquerade &&
		slices.Equal(a.Sources, b.Sources)
}

func equalEndpoints(a, b []*tracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] ||
		slices.EqualFunc(a, b, (*tracker.Endpoint).Equal))
}
