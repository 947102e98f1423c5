package cluster

import (
	"errors"
	"fmt"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestAnObjectOfAKindThatIsNotServedIsNotAbsent(t *testing.T) {
	gone := apierrors.NewNotFound(schema.GroupResource{Group: "apps", Resource: "statefulsets"}, "web")
	notServed := apierrors.NewGenericServerResponse(404, "get",
		schema.GroupResource{Group: "apps.kruise.io", Resource: "statefulsets"}, "web", "404 page not found", 0, true)
	if !apierrors.IsNotFound(notServed) {
		t.Fatal("the test is wrong: both are a 404")
	}
	if !Absent(fmt.Errorf("reading: %w", gone)) || Absent(notServed) || Absent(errors.New("timeout")) || Absent(nil) {
		t.Errorf("absent: %v for an object that is gone, %v for a kind that is not served", Absent(gone), Absent(notServed))
	}
}
