package ids_test

import (
	"fmt"

	"github.com/go-proxier/proxier/ruleset/ids"
)

// Keep the group IDs of an earlier process.
func Example() {
	a, err := ids.New[string](1, 100)
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := a.Adopt("web", 1); err != nil {
		fmt.Println(err)
	}
	if err := a.Adopt("api", 1); err != nil {
		fmt.Println(err)
	}
	for _, group := range []string{"api", "web", "api"} {
		id, err := a.Get(group)
		fmt.Println(group, id, err)
	}
	a.Release("web") // after its removal from the data plane
	id, err := a.Get("db")
	fmt.Println("db", id, err)
	// Output:
	// ids: ID 1 of api belongs to web
	// api 2 <nil>
	// web 1 <nil>
	// api 2 <nil>
	// db 1 <nil>
}
