package inspect

import (
	"encoding/xml"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
)

// TestPictureShowsTheScreen compares the text of the README's picture of top with the screen for its numbers.
func TestPictureShowsTheScreen(t *testing.T) {
	var rows []row
	for _, line := range []string{
		"shop/web http TCP IPv6 3035.7 3 0", "shop/web http TCP IPv4 2899.6 3 0", "shop/cart http TCP IPv4 2785.6 3 0",
		"kube-system/dns dns UDP IPv4 0 2 0", "kube-system/dns dns UDP IPv6 0 2 0", "shop/cart http TCP IPv6 0 3 0",
		"shop/empty http TCP IPv4 0 0 158", "shop/empty http TCP IPv6 0 0 0", "shop/local http TCP IPv4 0 2 0", "shop/local http TCP IPv6 0 2 0",
	} {
		r := row{ConnectionsPerSecond: new(0.0), Ready: new(0.0), Refused: new(0.0), Dropped: new(0.0)}
		must.Get(fmt.Sscan(line, &r.Service, &r.Port, &r.Protocol, &r.Family, r.ConnectionsPerSecond, r.Ready, r.Refused))(t)
		rows = append(rows, r)
	}
	s := screen{view: view{sort: byConnections}, mode: "nftables", every: time.Second}
	var picture struct {
		Text []string `xml:"text"`
	}
	must.Do(t, xml.Unmarshal(must.Get(os.ReadFile("../../top.svg"))(t), &picture))
	plain := func(lines []string) string { // without colors, and with one kind of space
		return strings.Join(strings.Fields(regexp.MustCompile("\x1b\\[[0-9]*m").ReplaceAllString(strings.Join(lines, " "), "")), " ")
	}
	// The picture begins with the window's title.
	if got, want := plain(picture.Text[1:]), plain(s.frame(rows, 96, 17)); got != want {
		t.Errorf("the picture shows\n%s\nthe screen shows\n%s", got, want)
	}
}
