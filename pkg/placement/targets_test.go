package placement

import (
	"errors"
	"fmt"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestAnOrphanTellsTheNameOfItsWorkload(t *testing.T) {
	yes := true
	for name, c := range map[string]struct {
		pod  metav1.ObjectMeta
		want string
	}{
		"orphan":        {metav1.ObjectMeta{Name: "my-web-3"}, "my-web"},
		"owned":         {metav1.ObjectMeta{Name: "my-web-3", OwnerReferences: []metav1.OwnerReference{{Controller: &yes}}}, ""},
		"no ordinal":    {metav1.ObjectMeta{Name: "my-web"}, ""},
		"only a number": {metav1.ObjectMeta{Name: "-3"}, ""},
	} {
		stem, ok := orphanOf(&c.pod)
		if ok != (c.want != "") || ok && stem != c.want {
			t.Errorf("%s: %q, %v, want %q", name, stem, ok, c.want)
		}
	}
}

func TestAKindThatIsNotServedDoesNotMeanThatItsObjectIsGone(t *testing.T) {
	gone := apierrors.NewNotFound(schema.GroupResource{Group: "apps", Resource: "statefulsets"}, "web")
	notServed := apierrors.NewGenericServerResponse(404, "get", schema.GroupResource{Group: "apps.kruise.io", Resource: "statefulsets"}, "web", "404 page not found", 0, true)
	if !apierrors.IsNotFound(notServed) {
		t.Fatal("the test is wrong: both are a 404")
	}
	if !absent(fmt.Errorf("reading: %w", gone)) || absent(notServed) || absent(errors.New("timeout")) || absent(nil) {
		t.Errorf("absent: %v for an object that is gone, %v for a kind that is not served", absent(gone), absent(notServed))
	}
}
