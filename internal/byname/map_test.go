package byname

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

type thing struct{ name types.NamespacedName }

func (t *thing) Name() types.NamespacedName { return t.name }

// TestMapAgreesWithGoMap compares with Go's map while hashes collide never, often or always.
func TestMapAgreesWithGoMap(t *testing.T) {
	for _, hashes := range []uint64{0, 1, 5} {
		t.Run(fmt.Sprintf("hashes=%d", hashes), func(t *testing.T) {
			m := New[*thing]()
			if good := m.hash; hashes > 0 {
				m.hash = func(n types.NamespacedName) uint64 { return good(n) % hashes }
			}
			model := map[types.NamespacedName]*thing{}
			r := rand.New(rand.NewPCG(1, hashes))
			for range 20000 {
				n := types.NamespacedName{Namespace: fmt.Sprint(r.IntN(3)), Name: fmt.Sprint(r.IntN(10))}
				switch v := model[n]; {
				case v == nil:
					v = &thing{n}
					model[n] = v
					m.Put(v)
				case r.IntN(2) == 0:
					delete(model, n)
					m.Delete(v)
					m.Delete(v) // the map may not have it
				}
				n = types.NamespacedName{Namespace: fmt.Sprint(r.IntN(3)), Name: fmt.Sprint(r.IntN(10))}
				if m.Get(n) != model[n] || m.Len() != len(model) {
					t.Fatalf("%v: %v, want %v; %d values, want %d", n, m.Get(n), model[n], m.Len(), len(model))
				}
			}
			seen := map[*thing]bool{}
			for v := range m.All() {
				seen[v] = true
				if model[v.name] != v {
					t.Errorf("All has %v", v.name)
				}
			}
			if len(seen) != len(model) {
				t.Errorf("All has %d values, want %d", len(seen), len(model))
			}
			for range m.All() {
				break
			}
		})
	}
}
