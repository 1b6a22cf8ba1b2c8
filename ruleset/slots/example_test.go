package slots_test

import (
	"fmt"

	"github.com/go-proxier/proxier/ruleset/slots"
)

// Remove one of three endpoints. The last one moves to its slot.
func Example() {
	var pool slots.Table[string, int] // endpoint to weight
	sync := func() {
		err := pool.Write(func(slot int, endpoint string, weight int) error {
			fmt.Println("put", slot, endpoint, weight)
			return nil
		})
		if err != nil {
			fmt.Println(err) // another Write continues from there
			return
		}
		fmt.Println("size", pool.Len())
		if err := pool.Trim(func(slot int) error {
			fmt.Println("delete", slot)
			return nil
		}); err != nil {
			fmt.Println(err)
		}
	}
	pool.Set("10.0.0.1:80", 1)
	pool.Set("10.0.0.2:80", 1)
	pool.Set("10.0.0.3:80", 1)
	sync()
	pool.Delete("10.0.0.1:80")
	sync()
	// Output:
	// put 0 10.0.0.1:80 1
	// put 1 10.0.0.2:80 1
	// put 2 10.0.0.3:80 1
	// size 3
	// put 0 10.0.0.3:80 1
	// size 2
	// delete 2
}
