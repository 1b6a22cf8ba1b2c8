package config

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// codec reads and writes configuration files. Making one takes longer than using it.
type codec struct {
	strict, lenient runtime.Decoder
	writer          runtime.Encoder
}

func newCodec() (*codec, error) {
	s := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(s); err != nil {
		return nil, err
	}
	return &codec{
		strict:  serializer.NewCodecFactory(s, serializer.EnableStrict).UniversalDeserializer(),
		lenient: serializer.NewCodecFactory(s).UniversalDeserializer(),
		writer:  json.NewSerializerWithOptions(json.DefaultMetaFactory, s, s, json.SerializerOptions{Yaml: true}),
	}, nil
}

// decode decodes a configuration file and sets no defaults. The notes name unknown and
// duplicate fields, which are ignored.
func (c *codec) decode(text []byte) (_ *v1alpha1.KubeProxyConfiguration, notes []string, err error) {
	o, _, err := c.strict.Decode(text, nil, nil)
	if runtime.IsStrictDecodingError(err) {
		problems, _ := runtime.AsStrictDecodingError(err)
		for _, p := range problems.Errors() {
			notes = append(notes, fmt.Sprintf("in the configuration file: %v: ignored", p))
		}
		o, _, err = c.lenient.Decode(text, nil, nil)
	}
	if err != nil {
		return nil, nil, err
	}
	k, ok := o.(*v1alpha1.KubeProxyConfiguration)
	if !ok {
		return nil, nil, fmt.Errorf("the file has a %T, not a KubeProxyConfiguration", o)
	}
	return k, notes, nil
}

// encode writes a configuration as a file that decode reads.
func (c *codec) encode(k *v1alpha1.KubeProxyConfiguration) ([]byte, error) {
	k = k.DeepCopy()
	k.SetGroupVersionKind(v1alpha1.SchemeGroupVersion.WithKind("KubeProxyConfiguration"))
	var b bytes.Buffer
	if err := c.writer.Encode(k, &b); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Encode returns a configuration as the text of a file.
func Encode(k *v1alpha1.KubeProxyConfiguration) ([]byte, error) {
	c, err := newCodec()
	if err != nil {
		return nil, err
	}
	return c.encode(k)
}

// Write writes the configuration in effect to a file, complete or not at all.
func (c *Config) Write(path string) error {
	text, err := Encode(c.Effective)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".config-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails after the rename
	_, err = f.Write(text)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Chmod(f.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	return err
}
