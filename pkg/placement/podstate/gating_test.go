package podstate

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/test/must"
)

func TestPodsAreGatedThatAPersistentPodStateIsFor(t *testing.T) {
	of := func(name, apiVersion, kind, target string) kruisev1alpha1.PersistentPodState {
		s := object(name, 0)
		s.Spec.TargetReference = kruisev1alpha1.TargetReference{APIVersion: apiVersion, Kind: kind, Name: target}
		return s
	}
	all := []kruisev1alpha1.PersistentPodState{
		of("a", "apps/v1", "StatefulSet", "web"), of("b", "apps/v1", "StatefulSet", "web"), // in conflict: one line
		of("d", "apps.kruise.io/v1beta1", "StatefulSet", "web"), of("e", "example.com/v1", "Game", "g"),
	}
	if lines, want := gateLines(all),
		"\nGame.example.com.g\nStatefulSet.apps.kruise.io.web\nStatefulSet.apps.web\n"; lines != want {
		t.Errorf("the lines are %q, want %q", lines, want)
	}
	if lines := gateLines(nil); lines != "" {
		t.Errorf("the lines are %q, want none, so that the ConfigMap goes", lines)
	}
}

func TestWhatAConfigMapSaysIsNotBelievedForEver(t *testing.T) {
	g := &gating{}
	g.remember("ns", "\nStatefulSet.apps.web\n")
	if known := g.said["ns"]; time.Until(known.until) <= 0 || time.Until(known.until) > gateEvery {
		t.Errorf("it is believed until %s", known.until)
	}
	g.forget("ns")
	if len(g.said) != 0 {
		t.Error("it is not forgotten")
	}
}

// The policy finds ConfigMaps by their label, which earlier controllers did not write.
func TestAConfigMapWithoutItsLabelIsWrittenAgain(t *testing.T) {
	const lines = "\nStatefulSet.apps.web\n"
	cm := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: home.GatedWorkloads},
		Data:       map[string]string{gate.WorkloadsKey: lines},
	}
	api := fake.NewClientBuilder().WithObjects(cm).Build()
	g := &gating{client: api, live: api}
	if is, err := g.says(t.Context(), "ns"); err != nil || is == lines {
		t.Errorf("without the label it says %q, %v", is, err)
	}
	must.Do(t, g.say(t.Context(), "ns", lines))
	g.forget("ns")
	if is, err := g.says(t.Context(), "ns"); err != nil || is != lines {
		t.Errorf("with the label it says %q, %v", is, err)
	}
}
