//go:build linux

package nft

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// message is one netlink message as an independent decoder sees it.
type message struct {
	typ, flags uint16
	seq        uint32
	family     byte
	resID      uint16
	attrs      []attribute
}

type attribute struct {
	typ  uint16
	data []byte
}

// readAttributes reads attributes with github.com/vishvananda/netlink.
func readAttributes(t *testing.T, buf []byte) []attribute {
	t.Helper()
	list, err := nl.ParseRouteAttr(buf)
	if err != nil {
		t.Fatal(err)
	}
	var out []attribute
	for _, a := range list {
		out = append(out, attribute{a.Attr.Type, a.Value})
	}
	return out
}

// encoded writes attributes with github.com/vishvananda/netlink.
func encoded(list ...attribute) []byte {
	var out []byte
	for _, a := range list {
		out = append(out, nl.NewRtAttr(int(a.typ), a.data).Serialize()...)
	}
	return out
}

// split splits a finished batch.
func split(t *testing.T, buf []byte) []message {
	t.Helper()
	var out []message
	for len(buf) > 0 {
		if len(buf) < unix.NLMSG_HDRLEN+4 {
			t.Fatalf("%d bytes left over", len(buf))
		}
		n := binary.NativeEndian.Uint32(buf)
		if n%4 != 0 || int(n) > len(buf) {
			t.Fatalf("message of %d bytes in %d", n, len(buf))
		}
		m := message{
			typ:    binary.NativeEndian.Uint16(buf[4:]),
			flags:  binary.NativeEndian.Uint16(buf[6:]),
			seq:    binary.NativeEndian.Uint32(buf[8:]),
			family: buf[16],
			resID:  binary.BigEndian.Uint16(buf[18:]),
		}
		m.attrs = readAttributes(t, buf[20:n])
		out = append(out, m)
		buf = buf[n:]
	}
	return out
}

func nested(t *testing.T, a attribute) []attribute {
	t.Helper()
	if a.typ&unix.NLA_F_NESTED == 0 {
		t.Fatalf("attribute %d is not marked as nested", a.typ)
	}
	return readAttributes(t, a.data)
}

func TestBatchIsFramed(t *testing.T) {
	var b Batch
	for range 2 { // the second use must not contain the first
		b.Reset()
		if !b.Empty() {
			t.Fatal("a new batch is not empty")
		}
		b.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_IPV6)
		b.String(unix.NFTA_TABLE_NAME, "abcd")
		b.Uint32(unix.NFTA_TABLE_FLAGS, 1)
		b.End()
		if b.Empty() {
			t.Fatal("a batch with a message is empty")
		}
		m := split(t, b.Finish())
		if len(m) != 3 {
			t.Fatalf("%d messages", len(m))
		}
		for i, want := range []message{
			{typ: unix.NFNL_MSG_BATCH_BEGIN, flags: unix.NLM_F_REQUEST, seq: 0, resID: unix.NFNL_SUBSYS_NFTABLES},
			{typ: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE, flags: unix.NLM_F_REQUEST | unix.NLM_F_CREATE | unix.NLM_F_ACK, seq: 1, family: unix.NFPROTO_IPV6},
			{typ: unix.NFNL_MSG_BATCH_END, flags: unix.NLM_F_REQUEST, seq: 2, resID: unix.NFNL_SUBSYS_NFTABLES},
		} {
			got := m[i]
			got.attrs = nil
			if got.typ != want.typ || got.flags != want.flags || got.seq != want.seq || got.family != want.family || got.resID != want.resID {
				t.Errorf("message %d is %+v, want %+v", i, got, want)
			}
		}
		if a := m[1].attrs; len(a) != 2 || string(a[0].data) != "abcd\x00" || !bytes.Equal(a[1].data, []byte{0, 0, 0, 1}) {
			t.Errorf("attributes %+v", a)
		}
	}
}

// TestElementsAgainstLibrary compares encoded elements with the netlink library's.
func TestElementsAgainstLibrary(t *testing.T) {
	const nest = unix.NLA_F_NESTED
	value := func(typ uint16, v []byte) attribute {
		return attribute{typ | nest, encoded(attribute{unix.NFTA_DATA_VALUE, v})}
	}
	elem := func(list ...attribute) []byte {
		return encoded(attribute{unix.NFTA_LIST_ELEM | nest, encoded(list...)})
	}
	key, data := []byte("12345"), []byte("abcdef")
	jump := int32(unix.NFT_GOTO)
	for name, c := range map[string]struct {
		add  func(*Elements)
		want []byte
	}{
		"set": {func(e *Elements) { e.Add(key, nil, "") }, elem(value(unix.NFTA_SET_ELEM_KEY, key))},
		"map with a comment": {
			func(e *Elements) { e.Add(key, data, "a/b:c") },
			elem(value(unix.NFTA_SET_ELEM_KEY, key), value(unix.NFTA_SET_ELEM_DATA, data),
				attribute{unix.NFTA_SET_ELEM_USERDATA, []byte("\x00\x06a/b:c\x00")}),
		},
		"verdict": {
			func(e *Elements) { e.AddVerdict(key, "chain") },
			elem(value(unix.NFTA_SET_ELEM_KEY, key), attribute{unix.NFTA_SET_ELEM_DATA | nest, encoded(
				attribute{unix.NFTA_DATA_VERDICT | nest, encoded(
					attribute{unix.NFTA_VERDICT_CODE, binary.BigEndian.AppendUint32(nil, uint32(jump))},
					attribute{unix.NFTA_VERDICT_CHAIN, []byte("chain\x00")},
				)},
			)}),
		},
		"interval": {
			func(e *Elements) { e.AddInterval(key, data) },
			append(elem(value(unix.NFTA_SET_ELEM_KEY, key)), elem(value(unix.NFTA_SET_ELEM_KEY, data),
				attribute{unix.NFTA_SET_ELEM_FLAGS, []byte{0, 0, 0, unix.NFT_SET_ELEM_INTERVAL_END}})...),
		},
	} {
		var e Elements
		c.add(&e)
		if !bytes.Equal(e.buf, c.want) {
			t.Errorf("%s:\n% x\nwant\n% x", name, e.buf, c.want)
		}
	}
}

func TestManyElementsAreDivided(t *testing.T) {
	var b Batch
	b.Reset()
	var e Elements
	const count = 10000
	for i := range count {
		e.Add(binary.BigEndian.AppendUint32(nil, uint32(i)), []byte("12345678"), "comment")
	}
	if e.Count() != count {
		t.Fatalf("%d elements", e.Count())
	}
	b.Elements(unix.NFT_MSG_NEWSETELEM, 0, unix.NFPROTO_IPV4, "table", "set", &e)
	messages := split(t, b.Finish())
	next := uint32(0)
	for _, m := range messages[1 : len(messages)-1] {
		if string(m.attrs[0].data) != "table\x00" || string(m.attrs[1].data) != "set\x00" {
			t.Fatalf("message of %q %q", m.attrs[0].data, m.attrs[1].data)
		}
		for _, a := range nested(t, m.attrs[2]) {
			k := nested(t, nested(t, a)[0])[0].data
			if got := binary.BigEndian.Uint32(k); got != next {
				t.Fatalf("element %d comes where %d should", got, next)
			}
			next++
		}
	}
	if next != count || len(messages) < 5 {
		t.Errorf("%d elements in %d messages", next, len(messages))
	}
}

func TestCommentsArePrintable(t *testing.T) {
	for in, want := range map[string]string{
		"ns/name:port":           "ns/name:port",
		"a\"b\\c\nd\x00e\x7fé":   "a?b?c?d?e???",
		strings.Repeat("x", 300): strings.Repeat("x", MaxComment),
	} {
		var e Elements
		e.Add([]byte{1}, nil, in)
		found := false
		for _, one := range nfnl.Attributes(e.buf) {
			for typ, data := range nfnl.Attributes(one) {
				if typ == unix.NFTA_SET_ELEM_USERDATA {
					found = true
					if got := Comment(data); got != want {
						t.Errorf("%q became %q, want %q", in, got, want)
					}
				}
			}
		}
		if !found {
			t.Errorf("%q: no comment", in)
		}
	}
}
