package balance

import (
	"fmt"
	"testing"
	"time"
)

// BenchmarkPick measures one choice, the cost for one connection.
func BenchmarkPick(b *testing.B) {
	for _, n := range []int{3, 100, 1000} {
		p := pool(equal(n)...)
		run := func(name string, bal Balancer) {
			b.Run(fmt.Sprintf("%s/endpoints=%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if bal.Pick(p, client) == nil {
						b.Fatal("nothing picked")
					}
				}
			})
		}
		run("maglev", &Maglev{Port: true})
		for _, name := range Names() {
			a, err := Parse(name)
			if err != nil {
				b.Fatal(err)
			}
			run(name, a.New(idle))
			if a == 0 {
				run("affinity", NewAffinity(time.Hour, 0).Wrap(a.New(idle)))
			}
		}
	}
}
