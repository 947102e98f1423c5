package v1alpha1

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// unbounded are the fields whose lengths a definition cannot state. The selectors are of a type of Kubernetes' own:
// administrators alone write pools, and a rule bounds the numbers of labels and expressions. The values are those of a
// node's labels and a pod's annotations, which the API server bounds, and the controller alone writes them.
var unbounded = []string{".spec.namespaceSelector", ".spec.nodeSelector",
	".status.podStates{}.nodeTopologyLabels{}", ".status.podStates{}.annotations{}"}

// A field without a bound lets a single object be as large as etcd takes it, and every program that lists it needs the
// memory.
func TestEveryFieldOfADefinitionIsBounded(t *testing.T) {
	files, err := filepath.Glob("../../../../deploy/chart/files/crds/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	fields := 0
	for _, file := range files {
		if strings.HasPrefix(filepath.Base(file), "spiderpool.") {
			continue // it is Spiderpool's, field for field, and administrators alone write it
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var crd struct {
			Spec struct {
				Versions []struct {
					Name   string
					Schema struct{ OpenAPIV3Schema map[string]any }
				}
			}
		}
		if err := yaml.Unmarshal(text, &crd); err != nil {
			t.Fatal(err)
		}
		for _, v := range crd.Spec.Versions {
			for path, missing := range missingBounds(v.Schema.OpenAPIV3Schema, "", &fields) {
				t.Errorf("%s, %s%s: no %s", filepath.Base(file), v.Name, path, missing)
			}
		}
	}
	if fields < 100 {
		t.Errorf("found %d fields", fields)
	}
}

func missingBounds(schema map[string]any, path string, fields *int) map[string]string {
	missing := map[string]string{}
	if slices.Contains(unbounded, path) {
		return missing
	}
	*fields++
	need := func(bound string) {
		if schema[bound] == nil {
			missing[path] = bound
		}
	}
	below := func(key, path string) {
		if s, ok := schema[key].(map[string]any); ok {
			for path, bound := range missingBounds(s, path, fields) {
				missing[path] = bound
			}
		}
	}
	switch schema["type"] {
	case "string":
		if schema["enum"] == nil && schema["format"] != "date-time" {
			need("maxLength")
		}
	case "array":
		need("maxItems")
		below("items", path+"[]")
	case "object":
		if schema["additionalProperties"] != nil {
			need("maxProperties")
			below("additionalProperties", path+"{}")
		}
		properties, _ := schema["properties"].(map[string]any)
		for name, property := range properties {
			if at := path + "." + name; !slices.Contains([]string{".metadata", ".kind", ".apiVersion"}, at) {
				for path, bound := range missingBounds(property.(map[string]any), at, fields) {
					missing[path] = bound
				}
			}
		}
	}
	return missing
}
