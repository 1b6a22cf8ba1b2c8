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

// scheme knows the one kind of configuration file.
func scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, v1alpha1.AddToScheme(s)
}

// decode reads a configuration file, without defaults. Notes is what a strict
// reader would have refused.
func decode(text []byte) (c *v1alpha1.KubeProxyConfiguration, notes []string, err error) {
	s, err := scheme()
	if err != nil {
		return nil, nil, err
	}
	strict := serializer.NewCodecFactory(s, serializer.EnableStrict)
	o, _, err := strict.UniversalDeserializer().Decode(text, nil, nil)
	if runtime.IsStrictDecodingError(err) {
		problems, _ := runtime.AsStrictDecodingError(err)
		for _, p := range problems.Errors() {
			notes = append(notes, fmt.Sprintf("in the configuration file: %v: ignored", p))
		}
		o, _, err = serializer.NewCodecFactory(s).UniversalDeserializer().Decode(text, nil, nil)
	}
	if err != nil {
		return nil, nil, err
	}
	c, ok := o.(*v1alpha1.KubeProxyConfiguration)
	if !ok {
		return nil, nil, fmt.Errorf("it is a %T, not a KubeProxyConfiguration", o)
	}
	return c, notes, nil
}

// encode writes a configuration as a file that decode reads.
func encode(c *v1alpha1.KubeProxyConfiguration) ([]byte, error) {
	s, err := scheme()
	if err != nil {
		return nil, err
	}
	c = c.DeepCopy()
	c.SetGroupVersionKind(v1alpha1.SchemeGroupVersion.WithKind("KubeProxyConfiguration"))
	var b bytes.Buffer
	y := json.NewSerializerWithOptions(json.DefaultMetaFactory, s, s, json.SerializerOptions{Yaml: true})
	if err := y.Encode(c, &b); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Write writes the configuration in effect to a file, complete or not at all.
func (c *Config) Write(path string) error {
	text, err := encode(c.Effective)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".config-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails once it is renamed
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
