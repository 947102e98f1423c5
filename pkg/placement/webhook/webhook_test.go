package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiruntime "k8s.io/apimachinery/pkg/runtime"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/placement/gate"
	"github.com/stayput/stayput/test/must"
)

func aPod(change ...func(*corev1.Pod)) *corev1.Pod {
	controls := true
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-0", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "web", Controller: &controls},
		}},
	}
	for _, c := range change {
		c(pod)
	}
	return pod
}

// nothing is a cluster that records no workload.
func nothing() Options {
	return Options{
		Recorded: func(context.Context, string, *metav1.OwnerReference) (bool, error) { return false, nil },
	}
}

// ask posts a body to a path of the webhook.
func ask(o Options, path string, body io.Reader) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	newHandler(o).ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, body))
	return w
}

// admitted returns a pod as the API server has it after the webhook's answer.
func admitted(t *testing.T, o Options, path string, of *corev1.Pod) *corev1.Pod {
	t.Helper()
	raw, err := json.Marshal(of)
	must.Do(t, err)
	body, err := json.Marshal(admissionv1.AdmissionReview{Request: &admissionv1.AdmissionRequest{
		UID: "asked", Namespace: of.Namespace, Object: apiruntime.RawExtension{Raw: raw},
	}})
	must.Do(t, err)
	w := ask(o, path, bytes.NewReader(body))
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal(w.Body.Bytes(), &review); err != nil || w.Code != http.StatusOK {
		t.Fatalf("answered by %d %s: %v", w.Code, w.Body, err)
	}
	is := review.Response
	if review.Kind != "AdmissionReview" || review.APIVersion != "admission.k8s.io/v1" || is.UID != "asked" || !is.Allowed {
		t.Fatalf("answered by %s", w.Body)
	}
	if len(is.Patch) > 0 {
		if *is.PatchType != admissionv1.PatchTypeJSONPatch {
			t.Errorf("a patch of type %s", *is.PatchType)
		}
		patch, err := jsonpatch.DecodePatch(is.Patch)
		must.Do(t, err)
		raw, err = patch.Apply(raw)
		must.Do(t, err)
	}
	pod := &corev1.Pod{}
	must.Do(t, json.Unmarshal(raw, pod))
	return pod
}

func gatesOf(pod *corev1.Pod) (names []string) {
	for _, g := range pod.Spec.SchedulingGates {
		names = append(names, g.Name)
	}
	return names
}

func TestAPodIsLabelledAndGatedIfItCanBe(t *testing.T) {
	gated := func(names ...string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			for _, n := range names {
				p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: n})
			}
		}
	}
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		want []string
	}{
		"a pod":                    {pod: aPod(), want: []string{v1alpha1.PlacementGate}},
		"one with the gate":        {pod: aPod(gated(v1alpha1.PlacementGate)), want: []string{v1alpha1.PlacementGate}},
		"one with somebody else's": {pod: aPod(gated("a/b")), want: []string{"a/b", v1alpha1.PlacementGate}},
		"one with a node":          {pod: aPod(func(p *corev1.Pod) { p.Spec.NodeName = "node-1" })},
		"one of a DaemonSet": {pod: aPod(func(p *corev1.Pod) {
			yes := true
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Controller: &yes}}
		})},
	} {
		is := admitted(t, nothing(), Path, c.pod)
		if gates := gatesOf(is); !slices.Equal(gates, c.want) {
			t.Errorf("%s has the gates %q, want %q", name, gates, c.want)
		}
		if is.Labels[gate.ManagedLabel] != gate.Managed {
			t.Errorf("%s has the labels %v, so that no controller sees it", name, is.Labels)
		}
	}
}

func TestAGatedPodIsLabelledInTheSameWrite(t *testing.T) {
	for name, labels := range map[string]map[string]string{
		"without labels": nil, "with labels": {"app": "web"}, "with another value": {"app": "web", gate.ManagedLabel: "no"},
	} {
		is := admitted(t, nothing(), Path, aPod(func(p *corev1.Pod) { p.Labels = labels }))
		if is.Labels[gate.ManagedLabel] != gate.Managed || is.Labels["app"] != labels["app"] {
			t.Errorf("a pod %s has the labels %v", name, is.Labels)
		}
	}
	if is := admitted(t, nothing(), RecordedPath, aPod()); is.Labels != nil {
		t.Errorf("a pod that is not gated has the labels %v", is.Labels)
	}
}

func TestAPodIsGatedIfItsWorkloadIsRecorded(t *testing.T) {
	o := nothing()
	o.Recorded = func(ctx context.Context, namespace string, w *metav1.OwnerReference) (bool, error) {
		if _, limited := ctx.Deadline(); !limited {
			t.Error("it may take for ever")
		}
		return namespace == "shop" && w.APIVersion == "apps/v1" && w.Kind == "StatefulSet" && w.Name == "web", nil
	}
	owned := func(change func(*metav1.OwnerReference)) *corev1.Pod {
		return aPod(func(p *corev1.Pod) { change(&p.OwnerReferences[0]) })
	}
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"recorded":             {aPod(), true},
		"of another name":      {owned(func(o *metav1.OwnerReference) { o.Name = "we" }), false},
		"not controlled":       {owned(func(o *metav1.OwnerReference) { o.Controller = nil }), false},
		"of another namespace": {aPod(func(p *corev1.Pod) { p.Namespace = "other" }), false},
	} {
		if is := gatesOf(admitted(t, o, RecordedPath, c.pod)); (len(is) == 1) != c.want {
			t.Errorf("a pod %s has the gates %q", name, is)
		}
	}
}

// By such a status the API server lets the pod in, since the failurePolicy is Ignore. An answer that does not allow the
// pod would refuse it.
func TestWhatCannotBeDecidedIsNotAnswered(t *testing.T) {
	unknown := nothing()
	unknown.Recorded = func(context.Context, string, *metav1.OwnerReference) (bool, error) {
		return false, errors.New("unknown yet whether OpenKruise is running")
	}
	owned := `{"request":{"object":{"metadata":{"ownerReferences":[{"controller":true}]}}}}`
	for name, c := range map[string]struct {
		body string
		code int
	}{
		"a workload of which nothing is known": {owned, http.StatusInternalServerError},
		"not a review":                         {"[]", http.StatusBadRequest},
		"half a review":                        {owned[:40], http.StatusBadRequest},
		"a review without a request":           {"{}", http.StatusBadRequest},
		"one with thousands of owners": {strings.Replace(owned, "[", "["+strings.Repeat("{},", listMost/3), 1),
			http.StatusBadRequest},
		"one beyond any pod": {`{"request":{"uid":"` + strings.Repeat("x", bodyMost) + `"}}`, http.StatusBadRequest},
	} {
		if w := ask(unknown, RecordedPath, strings.NewReader(c.body)); w.Code != c.code {
			t.Errorf("%s is answered by %d %s, want %d", name, w.Code, w.Body, c.code)
		}
	}
}

// Such a request, of as many bytes as one may have, took 1.3 GiB when pods were decoded as a whole.
func TestARequestOfManySmallPartsTakesLittleMemory(t *testing.T) {
	for name, around := range map[string][2]string{
		"containers":      {`"object":{"spec":{"containers":[{}`, `]}}`},
		"tolerations":     {`"object":{"spec":{"tolerations":[{}`, `]}}`},
		"terms":           {`"object":{"spec":{"affinity":{"nodeAffinity":{"x":{"nodeSelectorTerms":[{}`, `]}}}}}`},
		"owners":          {`"object":{"metadata":{"ownerReferences":[{}`, `]}}`},
		"gates":           {`"object":{"spec":{"schedulingGates":[{}`, `]}}`},
		"managed fields":  {`"object":{"metadata":{"managedFields":[{}`, `]}}`},
		"groups of users": {`"userInfo":{"groups":[{}`, `]}`},
		"other fields":    {`"options":[{}`, `]`},
	} {
		head, foot := `{"request":{`+around[0], around[1]+"}}"
		body := head + strings.Repeat(",{}", (bodyMost-len(head)-len(foot))/3) + foot
		for _, path := range []string{Path, RecordedPath} {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			ask(nothing(), path, strings.NewReader(body))
			runtime.ReadMemStats(&after)
			if took := after.TotalAlloc - before.TotalAlloc; took > 8*bodyMost {
				t.Errorf("%d KiB of %s at %s took %d KiB", len(body)>>10, name, path, took>>10)
			}
		}
	}
}

func TestTwoLargeRequestsAreReadAtATimeAndSmallOnesBeside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHandler(nothing())
		begin := func(body io.Reader) <-chan int {
			code := make(chan int, 1)
			go func() {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, Path, body))
				code <- w.Code
			}()
			synctest.Wait()
			return code
		}
		small := `{"request":{}}`
		large := small + strings.Repeat(" ", bodySmall)
		var ends []*io.PipeWriter
		var slow []<-chan int
		for range largeBodies {
			body, send := io.Pipe()
			slow = append(slow, begin(body))
			_, err := io.WriteString(send, large)
			must.Do(t, err)
			ends = append(ends, send)
		}
		synctest.Wait()
		waits := begin(strings.NewReader(large))
		if code := <-begin(strings.NewReader(small)); code != http.StatusOK {
			t.Errorf("a small one is answered by %d", code)
		}
		if code := <-waits; code != http.StatusServiceUnavailable { // after answerWithin
			t.Errorf("one more large one is answered by %d", code)
		}
		waits = begin(strings.NewReader(large))
		for i, end := range ends {
			must.Do(t, end.Close())
			if code := <-slow[i]; code != http.StatusOK {
				t.Errorf("a slow one is answered by %d", code)
			}
		}
		if code := <-waits; code != http.StatusOK {
			t.Errorf("the next one is answered by %d", code)
		}
	})
}

// As while the caches are being filled.
func TestALargeRequestKeepsItsPlaceUntilItIsAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := nothing()
		o.Recorded = func(ctx context.Context, _ string, _ *metav1.OwnerReference) (bool, error) {
			time.Sleep(answerWithin - time.Second)
			return false, nil
		}
		h := newHandler(o)
		large := `{"request":{"object":{"metadata":{"ownerReferences":[{"controller":true}]}}}}` + strings.Repeat(" ", bodySmall)
		start := time.Now()
		var all sync.WaitGroup
		for range 2 * largeBodies {
			all.Go(func() {
				h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, RecordedPath, strings.NewReader(large)))
			})
		}
		all.Wait()
		if took := time.Since(start); took != 2*(answerWithin-time.Second) {
			t.Errorf("%d at a time took %v", 2*largeBodies, took)
		}
	})
}

// The policy stayput-restored does the same: test/cluster has its test.
func TestACopyOfAPodHasNothingThatStayputWroteOnIt(t *testing.T) {
	in := func(key, value string) corev1.NodeSelectorRequirement {
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{value}}
	}
	ssd := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{in("disk", "ssd")}}
	pin := corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{in("metadata.name", "old-7")}}
	both := corev1.NodeSelectorTerm{MatchExpressions: ssd.MatchExpressions, MatchFields: pin.MatchFields}
	pod := func(terms []corev1.NodeSelectorTerm, annotations ...string) *corev1.Pod {
		return aPod(func(p *corev1.Pod) {
			p.Annotations = map[string]string{v1alpha1.AnnotationRetainIP: "10m"}
			for i := 0; i < len(annotations); i += 2 {
				p.Annotations[annotations[i]] = annotations[i+1]
			}
			if terms != nil {
				p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
					RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms}}}
			}
		})
	}
	const l2, ofCalico = `[{"interface":"eth0","mode":"L2"}]`, `[{"interface":"eth0","mode":"Calico"}]`
	for name, c := range map[string]struct {
		pod   *corev1.Pod
		terms []corev1.NodeSelectorTerm
		kept  []string
	}{
		"pinned": {pod([]corev1.NodeSelectorTerm{pin}, v1alpha1.AnnotationPinned, "node old-7"), nil, nil},
		"pinned beside its own": {pod([]corev1.NodeSelectorTerm{both}, v1alpha1.AnnotationPinned, "node old-7"),
			[]corev1.NodeSelectorTerm{ssd}, nil},
		"pinned to another node": {pod([]corev1.NodeSelectorTerm{pin}, v1alpha1.AnnotationPinned, "node b"),
			[]corev1.NodeSelectorTerm{pin}, nil},
		"pinned, without affinity": {pod(nil, v1alpha1.AnnotationPinned, "node old-7"), nil, nil},
		"with addresses": {pod([]corev1.NodeSelectorTerm{pin}, v1alpha1.AnnotationAddresses, l2, calicoAddresses, "[]"),
			[]corev1.NodeSelectorTerm{pin}, []string{calicoAddresses}},
		"with addresses of Calico's": {pod(nil, v1alpha1.AnnotationAddresses, ofCalico, calicoAddresses, "[]"), nil, nil},
	} {
		is := admitted(t, nothing(), RestoredPath, c.pod)
		var terms []corev1.NodeSelectorTerm
		if a := is.Spec.Affinity; a != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
			terms = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
		}
		if !equality.Semantic.DeepEqual(terms, c.terms) {
			t.Errorf("%s: it requires %+v, want %+v", name, terms, c.terms)
		}
		if keys := slices.Sorted(maps.Keys(is.Annotations)); !slices.Equal(keys, append(c.kept,
			v1alpha1.AnnotationRetainIP)) {
			t.Errorf("%s: it has the annotations %q", name, keys)
		}
	}
	many := make([]corev1.NodeSelectorTerm, listMost)
	body, err := json.Marshal(map[string]any{"request": map[string]any{
		"object": pod(many, v1alpha1.AnnotationPinned, "node old-7")}})
	must.Do(t, err)
	if w := ask(nothing(), RestoredPath, bytes.NewReader(body)); w.Code == http.StatusOK {
		t.Errorf("terms of more than %d bytes are answered by %d", listMost, w.Code)
	}
}
