//go:build linux

package ipvs

import (
	"errors"
	"maps"
	"testing"
)

// TestListIsReadUntilTwoAreEqual reads lists in which the kernel left elements out.
func TestListIsReadUntilTwoAreEqual(t *testing.T) {
	t.Parallel()
	type list = map[string]int
	whole := list{"a": 1, "b": 2, "c": 3}
	broken := errors.New("broken")
	for _, c := range []struct {
		name  string
		lists []list // the last one repeats; nil is an error
		want  list
		reads int
	}{
		{"quiet", []list{whole}, whole, 2},
		{"empty", []list{{}}, list{}, 2},
		{"the first list lacks an element", []list{{"a": 1, "c": 3}, whole}, whole, 3},
		{"the second list lacks an element", []list{whole, {"b": 2, "c": 3}, whole}, whole, 4},
		{"an element is deleted", []list{whole, {"a": 1}}, list{"a": 1}, 3},
		{"an element is changed", []list{{"a": 1}, {"a": 7}}, list{"a": 7}, 3},
		{"an error", []list{whole, nil}, nil, 2},
	} {
		reads := 0
		got, err := sameTwice(func() (list, error) {
			l := c.lists[min(reads, len(c.lists)-1)]
			reads++
			if l == nil {
				return nil, broken
			}
			return l, nil
		})
		if !maps.Equal(got, c.want) || reads != c.reads || (c.want == nil) != errors.Is(err, broken) {
			t.Errorf("%s: %v after %d reads, %v; want %v after %d", c.name, got, reads, err, c.want, c.reads)
		}
	}
	// If no two lists are equal, the result has all elements.
	reads := 0
	got, err := sameTwice(func() (list, error) {
		reads++
		return list{"a": 1, []string{"b", "c"}[reads%2]: 0}, nil
	})
	if err != nil || !maps.Equal(got, list{"a": 1, "b": 0, "c": 0}) || reads > 100 {
		t.Errorf("%v after %d reads, %v", got, reads, err)
	}
}
