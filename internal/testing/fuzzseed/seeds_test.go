package fuzzseed

import (
	"reflect"
	"testing"
)

func TestSeedsAreParsed(t *testing.T) {
	got, err := parse(header + "[]byte(\"\\x00\\n)\")\nbyte('\\'')\nbyte('ÿ')\nuint16(65535)\n" + header + "string(\"(\\\"\")\nint64(-148)\nuint32(7)\nuint64(1)\n")
	want := [][]any{{[]byte("\x00\n)"), byte('\''), byte(0xff), uint16(65535)}, {`("`, int64(-148), uint32(7), uint64(1)}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%#v, %v, want %#v", got, err, want)
	}
	for _, text := range []string{
		"", "string(\"\")\n", header + "\n", header + "string(\"\n", header + "string(x)\n", header + "uint16(65536)\n", header + "bool(true)\n", header + "byte('ab')\n", header + "byte('日')\n",
	} {
		if got, err := parse(text); err == nil {
			t.Errorf("%q is parsed as %v", text, got)
		}
	}
}
