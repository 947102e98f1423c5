package podip

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/node/apiserver"
)

// serve is an API server that answers requests of METHOD PATH?QUERY as the table says, and anything else as if it did
// not know the kind.
func serve(t *testing.T, table map[string]string) (*server, *[]string) {
	t.Helper()
	var got []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = append(got, strings.TrimSpace(r.Method+" "+r.URL.RequestURI()+" "+string(body)))
		w.Header().Set("Content-Type", "application/json")
		for what, answer := range table {
			if path, _, _ := strings.Cut(r.URL.RequestURI(), "?"); what == r.Method+" "+path {
				if strings.HasPrefix(answer, `{"kind":"Status"`) {
					w.WriteHeader(404)
				}
				fmt.Fprint(w, answer)
				return
			}
		}
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(404)
		fmt.Fprint(w, "404 page not found")
	}))
	t.Cleanup(s.Close)
	c, err := apiserver.New(&rest.Config{Host: s.URL}, node, AddToScheme)
	check(t, err)
	return &server{c, node}, &got
}

func missing(resource, name string) string {
	return fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,`+
		`"details":{"name":%q,"kind":%q}}`, name, resource)
}

func TestTheAPIServerIsAskedPastItsCaches(t *testing.T) {
	c, got := serve(t, map[string]string{
		"GET /api/v1/pods": `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"7"},"items":[
			{"metadata":{"namespace":"default","name":"web-0","uid":"u","resourceVersion":"5",
			"annotations":{"stayput.io/addresses":"[]","example.com/notes":"long"},"labels":{"app":"web"},
			"managedFields":[{"manager":"kubectl"}]},"spec":{"nodeName":"n1","containers":[{"name":"a"}]},
			"status":{"phase":"Failed"}}]}`,
		"GET /apis/stayput.io/v1alpha1/podipaudits": `{"kind":"PodIPAuditList","apiVersion":"stayput.io/v1alpha1",
			"metadata":{"resourceVersion":"8"},"items":[{"metadata":{"name":"cluster"},"spec":{"epoch":"2026-01-02T03:04:05.000006Z","mark":null}}]}`,
		"GET /apis/stayput.io/v1alpha1/podips/10.6.0.1": `{"kind":"PodIP","apiVersion":"stayput.io/v1alpha1",
			"metadata":{"name":"10.6.0.1","uid":"x","resourceVersion":"9"},"spec":{"podUID":"u"}}`,
		"GET /apis/stayput.io/v1alpha1/podips": `{"kind":"PodIPList","apiVersion":"stayput.io/v1alpha1",
			"metadata":{"resourceVersion":"8"},"items":[{"metadata":{"name":"10.6.0.1"},"spec":{"podUID":"u"}}]}`,
		"GET /api/v1/nodes/n1": `{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"uid":"node-uid"}}`,
	})
	pods, version, err := c.Pods(t.Context())
	check(t, err)
	if len(pods) != 1 || version != "7" || pods[0].UID != "u" || !pods[0].terminal() || pods[0].Spec.NodeName != "n1" ||
		pods[0].Annotations[v1alpha1.AnnotationAddresses] != "[]" ||
		len(pods[0].Annotations)+len(pods[0].Labels)+len(pods[0].ManagedFields) != 1 {
		t.Errorf("version %s of %+v", version, pods)
	}
	r, version, err := c.Audit(t.Context())
	check(t, err)
	if r == nil || r.Spec.Epoch.Nanosecond() != 6000 || version != "8" {
		t.Errorf("version %s of %+v", version, r)
	}
	ip, err := c.PodIP(t.Context(), addr(1))
	check(t, err)
	if ip == nil || ip.UID != "x" || ip.Spec.PodUID != "u" {
		t.Errorf("the PodIP is %+v", ip)
	}
	here, err := c.PodIPsHere(t.Context())
	check(t, err)
	if len(here) != 2 || here[0].Name != "10.6.0.1" { // by either field
		t.Errorf("the PodIPs that name the node are %+v", here)
	}
	for _, field := range []string{"status.nodeName", "spec.adoptedOn"} {
		if !slices.ContainsFunc(*got, func(s string) bool { return strings.Contains(s, "fieldSelector="+field+"%3Dn1") }) {
			t.Errorf("no PodIPs were asked for by %s: %s", field, *got)
		}
	}
	of, err := c.Node(t.Context())
	check(t, err)
	if of != "node-uid" {
		t.Errorf("the node is %s", of)
	}
	for _, request := range *got {
		if strings.Contains(request, "resourceVersion=") {
			t.Errorf("%s may be answered by a cache", request)
		}
	}
	if !strings.Contains((*got)[0], "fieldSelector=spec.nodeName%3Dn1") {
		t.Errorf("the pods of all nodes are asked for: %s", (*got)[0])
	}
}

func TestOnlyTheAPIServersWordMeansThatThereIsNone(t *testing.T) {
	c, _ := serve(t, map[string]string{
		"GET /api/v1/namespaces/default/pods/web-0":     missing("pods", "web-0"),
		"GET /apis/stayput.io/v1alpha1/podips/10.6.0.1": missing("podips", "10.6.0.1"),
		"GET /apis/stayput.io/v1alpha1/podipreports/n1": missing("podipreports", "n1"),
		"GET /api/v1/nodes/n1":                          missing("nodes", "n1"),
		"GET /apis/stayput.io/v1alpha1/podips/10.6.0.2": missing("namespaces", "x"),
		"GET /api/v1/namespaces/default/pods/y":         missing("namespaces", "default"),
	})
	p, err := c.Pod(t.Context(), "default", "web-0")
	check(t, err)
	ip, err := c.PodIP(t.Context(), addr(1))
	check(t, err)
	a, err := c.Report(t.Context())
	check(t, err)
	of, err := c.Node(t.Context())
	check(t, err)
	if p != nil || ip != nil || a != nil || of != "" {
		t.Errorf("found %v, %v, %v, %q", p, ip, a, of)
	}
	for what, ask := range map[string]func() error{
		"a pod of an API server without pods":      func() error { _, err := c.Pod(t.Context(), "default", "x"); return err },
		"a pod, and another thing is missing":      func() error { _, err := c.Pod(t.Context(), "default", "y"); return err },
		"a PodIP, and another thing is missing":    func() error { _, err := c.PodIP(t.Context(), addr(2)); return err },
		"a PodIP of an API server without PodIPs":  func() error { _, err := c.PodIP(t.Context(), addr(3)); return err },
		"pods of an API server without pods":       func() error { _, _, err := c.Pods(t.Context()); return err },
		"an audit of an API server without audits": func() error { _, _, err := c.Audit(t.Context()); return err },
	} {
		if ask() == nil {
			t.Errorf("%s: no error", what)
		}
	}
	none, _ := serve(t, nil)
	if _, err := none.Report(t.Context()); err == nil {
		t.Error("a report of an API server without reports: no error")
	}
	if _, err := none.Node(t.Context()); err == nil {
		t.Error("a node of an API server without nodes: no error")
	}
}

func TestANodeIsOffByItsTaintOrIfItIsDeleted(t *testing.T) {
	for answer, want := range map[string]bool{
		`{"kind":"Node","apiVersion":"v1","spec":{}}`:                                                    false,
		`{"kind":"Node","apiVersion":"v1","spec":{"taints":[{"key":"node.kubernetes.io/unreachable"}]}}`: false,
		`{"kind":"Node","apiVersion":"v1","spec":{"taints":[{"key":"x"},` +
			`{"key":"node.kubernetes.io/out-of-service","effect":"NoExecute"}]}}`: true,
		missing("nodes", "n1"): true,
	} {
		c, _ := serve(t, map[string]string{"GET /api/v1/nodes/n1": answer})
		off, err := c.Off(t.Context())
		check(t, err)
		if off != want {
			t.Errorf("off: %t by %s", off, answer)
		}
	}
	for _, answer := range []string{missing("namespaces", "x"), "", "{"} {
		answers := map[string]string{"GET /api/v1/nodes/n1": answer}
		if answer == "" {
			answers = nil
		}
		c, _ := serve(t, answers)
		if off, err := c.Off(t.Context()); err == nil {
			t.Errorf("off: %t by %q, and no error", off, answer)
		}
	}
}

func TestACloudsRouterIsKnownByTheNodesCondition(t *testing.T) {
	node := func(conditions string) string {
		return `{"kind":"Node","apiVersion":"v1","status":{"conditions":[{"type":"Ready","status":"True"}` + conditions + `]}}`
	}
	for answer, want := range map[string]bool{
		node(""): false,
		node(`,{"type":"NetworkUnavailable","status":"False","reason":"RouteCreated"}`):  true,
		node(`,{"type":"NetworkUnavailable","status":"True","reason":"NoRouteCreated"}`): false,
		node(`,{"type":"NetworkUnavailable","status":"False","reason":"FlannelIsUp"}`):   false,
		missing("nodes", "n1"): false,
	} {
		c, _ := serve(t, map[string]string{"GET /api/v1/nodes/n1": answer})
		is, err := c.RoutedByCloud(t.Context())
		check(t, err)
		if is != want {
			t.Errorf("%t by %s", is, answer)
		}
	}
	c, _ := serve(t, nil)
	if is, err := c.RoutedByCloud(t.Context()); err == nil {
		t.Errorf("%t without an answer, and no error", is)
	}
}

func TestWhatIsWrittenIsBoundToWhatWasSeen(t *testing.T) {
	c, got := serve(t, map[string]string{
		"PATCH /apis/stayput.io/v1alpha1/podips/10.6.0.1/status": `{"kind":"PodIP","apiVersion":"stayput.io/v1alpha1",` +
			`"metadata":{"name":"10.6.0.1","uid":"x","resourceVersion":"10"},"status":{"phase":"Bound"}}`,
		"PATCH /apis/stayput.io/v1alpha1/podips/10.6.0.2/status": missing("podips", "10.6.0.2"),
		"PATCH /apis/stayput.io/v1alpha1/podipreports/n1":        `{}`,
	})
	ip := &v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{Name: "10.6.0.1", UID: "x", ResourceVersion: "9"}}
	since := metav1.Now()
	ip.Status = v1alpha1.PodIPStatus{Phase: "Bound", PodUID: "u", NodeName: "n1", Since: &since}
	check(t, c.ApplyStatus(t.Context(), ip))
	ip.Name, ip.Status.PodCIDR = "10.6.0.2", "10.244.1.0/24"
	if err := c.ApplyStatus(t.Context(), ip); !apierrors.IsNotFound(err) {
		t.Errorf("a PodIP that is gone: %v", err)
	}
	check(t, c.ApplyReport(t.Context(), &v1alpha1.PodIPReport{Spec: v1alpha1.PodIPReportSpec{Epoch: *micro(5)}}))
	_, query, _ := strings.Cut((*got)[0], "?")
	query, body, _ := strings.Cut(query, " ")
	if query != "fieldManager=stayput-agent&force=true" {
		t.Errorf("asked with %s", query)
	}
	var sent struct {
		Metadata map[string]string
		Status   map[string]string
		Spec     any
	}
	check(t, json.Unmarshal([]byte(body), &sent))
	if sent.Metadata["uid"] != "x" || sent.Metadata["resourceVersion"] != "9" || sent.Spec != nil ||
		len(sent.Status) != 4 {
		t.Errorf("sent %s", body)
	}
	if !strings.Contains((*got)[1], `"podCIDR":"10.244.1.0/24"`) {
		t.Errorf("of a routed address, sent %s", (*got)[1])
	}
}

func TestAWatchBringsPods(t *testing.T) {
	c, _ := serve(t, map[string]string{
		"GET /api/v1/pods": `{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"uid":"u"},` +
			`"spec":{"nodeName":"n1"}}}` + "\n" + `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","code":410,` +
			`"reason":"Expired","status":"Failure"}}` + "\n",
	})
	w, err := c.WatchPods(t.Context(), "7")
	check(t, err)
	defer w.Stop()
	e := <-w.ResultChan()
	if p, ok := e.Object.(*Pod); !ok || p.UID != "u" || p.Spec.NodeName != "n1" {
		t.Errorf("the watch brings %+v", e)
	}
	if err := apierrors.FromObject((<-w.ResultChan()).Object); !apierrors.IsResourceExpired(err) {
		t.Errorf("the watch ends with %v", err)
	}
}

func TestAWatchBringsWherePodsAre(t *testing.T) {
	const kind = `"kind":"PodIP","apiVersion":"stayput.io/v1alpha1"`
	events := `{"type":"ADDED","object":{` + kind + `,"metadata":{"name":"10.50.0.1","resourceVersion":"8",` +
		`"managedFields":[{"fieldsV1":{"f:status":{"f:nodeName":{}}}}]},"spec":{"mode":"Routed","podUID":"u"},` +
		`"status":{"nodeName":"n2","phase":"Bound","podCIDR":"10.244.2.0/24","podUID":"u","since":"2026-01-01T00:00:00Z"}}}
{"type":"MODIFIED","object":{` + kind + `,"metadata":{"name":"10.50.0.1"},"spec":{"mode":"Routed","podUID":"u"}}}
{"type":"BOOKMARK","object":{` + kind + `,"metadata":{"resourceVersion":"9"},"spec":{"mode":""}}}
{"type":"DELETED","object":{` + kind + `,"metadata":{"name":"10.50.0.1"},"spec":{"mode":"Routed"},"status":{}}}
`
	c, got := serve(t, map[string]string{"GET /apis/stayput.io/v1alpha1/podips": events +
		`{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure",` +
		`"message":"too old resource version","reason":"Expired","code":410}}` + "\n"})
	w, err := c.WatchRouted(t.Context(), "7")
	check(t, err)
	defer w.Stop()
	if !strings.Contains((*got)[0], "fieldSelector=status.podCIDR%21%3D") || !strings.Contains((*got)[0], "watch=true") ||
		!strings.Contains((*got)[0], "resourceVersion=7") || !strings.Contains((*got)[0], "timeoutSeconds=600") {
		t.Errorf("asked with %s", (*got)[0])
	}
	for i, want := range []struct {
		kind watch.EventType
		ip   v1alpha1.PodIP
	}{
		{watch.Added, v1alpha1.PodIP{
			ObjectMeta: metav1.ObjectMeta{Name: "10.50.0.1", ResourceVersion: "8"},
			Spec:       v1alpha1.PodIPSpec{Mode: v1alpha1.ModeRouted, PodUID: "u"},
			Status: v1alpha1.PodIPStatus{Phase: v1alpha1.PodIPBound, PodUID: "u", NodeName: "n2",
				PodCIDR: "10.244.2.0/24"},
		}},
		{watch.Modified, v1alpha1.PodIP{
			ObjectMeta: metav1.ObjectMeta{Name: "10.50.0.1"},
			Spec:       v1alpha1.PodIPSpec{Mode: v1alpha1.ModeRouted, PodUID: "u"},
		}},
		{watch.Bookmark, v1alpha1.PodIP{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "9"}}},
		{watch.Deleted, v1alpha1.PodIP{
			ObjectMeta: metav1.ObjectMeta{Name: "10.50.0.1"}, Spec: v1alpha1.PodIPSpec{Mode: v1alpha1.ModeRouted},
		}},
	} {
		e := <-w.ResultChan()
		if ip, ok := e.Object.(*v1alpha1.PodIP); !ok || e.Type != want.kind || !reflect.DeepEqual(*ip, want.ip) {
			t.Errorf("event %d is %s %+v, want %s %+v", i, e.Type, e.Object, want.kind, want.ip)
		}
	}
	if err := apierrors.FromObject((<-w.ResultChan()).Object); !apierrors.IsResourceExpired(err) {
		t.Errorf("the watch ends with %v", err)
	}
	if e, open := <-w.ResultChan(); open {
		t.Errorf("after its end the watch brings %+v", e)
	}
}

func TestAWatchOfPodIPsThatCannotBeReadEndsWithAnError(t *testing.T) {
	for _, answer := range []string{
		"<html>\n",
		`{"type":"ADDED","object":{"metadata":{"name":"10.50.0.1"},"spec":{"mode":"Routed"},"status":"x"}}` + "\n",
		`{"type":"ADDED","object":{"metadata":{"name":7}}}` + "\n",
	} {
		c, _ := serve(t, map[string]string{"GET /apis/stayput.io/v1alpha1/podips": answer})
		w, err := c.WatchRouted(t.Context(), "7")
		check(t, err)
		if e, open := <-w.ResultChan(); !open || e.Type != watch.Error {
			t.Errorf("%q is %+v", answer, e)
		}
		w.Stop()
	}
	c, _ := serve(t, map[string]string{"GET /apis/stayput.io/v1alpha1/podips": missing("podips", "")})
	if _, err := c.WatchRouted(t.Context(), "7"); !apierrors.IsNotFound(err) {
		t.Errorf("an API server without PodIPs: %v", err)
	}
}

func TestAListBringsWherePodsAre(t *testing.T) {
	const one = `{"metadata":{"name":"10.50.0.1","resourceVersion":"5","managedFields":[{"fieldsV1":{"f:spec":{}}}]},` +
		`"spec":{"mode":"Routed","podUID":"u"},"status":{"nodeName":"n2","phase":"Bound","podCIDR":"10.244.2.0/24",` +
		`"podUID":"u","since":"2026-01-01T00:00:00Z"}}`
	const two = `{"metadata":{"name":"10.50.0.2"},"spec":{"mode":"Routed"}}`
	for answer, want := range map[string][]v1alpha1.PodIP{
		`{"apiVersion":"stayput.io/v1alpha1","items":[` + one + "," + two + `],"kind":"PodIPList","metadata":` +
			`{"continue":"","resourceVersion":"7"}}`: {
			{
				ObjectMeta: metav1.ObjectMeta{Name: "10.50.0.1", ResourceVersion: "5"},
				Spec:       v1alpha1.PodIPSpec{Mode: v1alpha1.ModeRouted, PodUID: "u"},
				Status: v1alpha1.PodIPStatus{Phase: v1alpha1.PodIPBound, PodUID: "u", NodeName: "n2",
					PodCIDR: "10.244.2.0/24"},
			},
			{ObjectMeta: metav1.ObjectMeta{Name: "10.50.0.2"}, Spec: v1alpha1.PodIPSpec{Mode: v1alpha1.ModeRouted}},
		},
		`{"metadata":{"resourceVersion":"7"},"items":[]}`: nil,
	} {
		c, got := serve(t, map[string]string{"GET /apis/stayput.io/v1alpha1/podips": answer})
		var ips []v1alpha1.PodIP
		version, err := c.Routed(t.Context(), func(ip *v1alpha1.PodIP) { ips = append(ips, *ip) })
		check(t, err)
		if version != "7" || !reflect.DeepEqual(ips, want) {
			t.Errorf("version %s of %+v, want %+v", version, ips, want)
		}
		if request := (*got)[0]; !strings.Contains(request, "fieldSelector=status.podCIDR%21%3D") ||
			strings.Contains(request, "resourceVersion=") {
			t.Errorf("asked with %s", request)
		}
	}
	for _, answer := range []string{
		"", "{}", "[]", "<html>", missing("podips", ""),
		`{"items":[]}`, `{"metadata":{"resourceVersion":"7"},"items":{}}`,
		`{"metadata":{"resourceVersion":"7"},"items":[` + one,
		`{"metadata":{"resourceVersion":"7"},"items":[` + one + `]`,
		`{"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"name":7}}]}`,
		`{"metadata":{"resourceVersion":"7"},"items":[{"status":"x"}]}`,
	} {
		c, _ := serve(t, map[string]string{"GET /apis/stayput.io/v1alpha1/podips": answer})
		if version, err := c.Routed(t.Context(), func(*v1alpha1.PodIP) {}); err == nil {
			t.Errorf("%q is version %s, and no error", answer, version)
		}
	}
}

func TestTheVersionIsPastTheCaches(t *testing.T) {
	c, got := serve(t, map[string]string{
		"GET /apis/stayput.io/v1alpha1/podipaudits": `{"metadata":{"resourceVersion":"9"},"items":[]}`})
	version, err := c.Version(t.Context())
	check(t, err)
	if version != "9" || strings.Contains((*got)[0], "resourceVersion=") {
		t.Errorf("%s is version %s", (*got)[0], version)
	}
	c, _ = serve(t, map[string]string{"GET /apis/stayput.io/v1alpha1/podipaudits": missing("podipaudits", "")})
	if version, err := c.Version(t.Context()); err == nil {
		t.Errorf("an API server without audits has version %s", version)
	}
}

func TestPodsAreWatchedInProtobuf(t *testing.T) {
	yes := true
	whole := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "web-0", UID: "u", ResourceVersion: "5",
			CreationTimestamp: metav1.Unix(1e9, 0), DeletionTimestamp: &metav1.Time{Time: time.Unix(1e9+1, 0)},
			Annotations:     map[string]string{v1alpha1.AnnotationAddresses: text(1), "example.com/notes": "long"},
			Labels:          map[string]string{"app": "web", statefulSetLabels + "pod-name": "web-0"},
			OwnerReferences: []metav1.OwnerReference{{Kind: "StatefulSet", Name: "web", Controller: &yes}},
			ManagedFields:   []metav1.ManagedFieldsEntry{{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1("{}")}},
		},
		Spec:   corev1.PodSpec{NodeName: node, HostNetwork: true, Containers: []corev1.Container{{Name: "a"}}},
		Status: corev1.PodStatus{Phase: corev1.PodSucceeded, PodIP: addr(1).String(), HostIP: "192.0.2.9"},
	}
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	if !ok {
		t.Fatal("client-go knows no protobuf")
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if is := r.Header.Get("Accept"); !strings.HasPrefix(is, runtime.ContentTypeProtobuf+",") {
			t.Errorf("pods are asked for as %q", is)
		}
		encode := func(o runtime.Object) []byte {
			b, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, corev1.SchemeGroupVersion), o)
			check(t, err)
			return b
		}
		object := encode(whole)
		if strings.HasSuffix(r.URL.Path, "/web-1") {
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
			w.WriteHeader(404)
			none := apierrors.NewNotFound(corev1.Resource("pods"), "web-1").Status()
			_, err := w.Write(encode(&none))
			check(t, err)
			return
		}
		if r.URL.Query().Get("watch") == "" {
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
			_, err := w.Write(object)
			check(t, err)
			return
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
		expired := apierrors.NewResourceExpired("too old").Status()
		for kind, object := range map[watch.EventType][]byte{watch.Modified: object, watch.Error: encode(&expired)} {
			check(t, scheme.Codecs.EncoderForVersion(info.StreamSerializer, corev1.SchemeGroupVersion).Encode(
				&metav1.WatchEvent{Type: string(kind), Object: runtime.RawExtension{Raw: object}},
				info.StreamSerializer.NewFrameWriter(w)))
		}
	}))
	defer s.Close()
	c, err := apiserver.New(&rest.Config{Host: s.URL}, node, AddToScheme)
	check(t, err)
	from := &server{c, node}

	b, err := json.Marshal(whole)
	check(t, err)
	want := &Pod{}
	check(t, json.Unmarshal(b, want))
	want.slim()

	is, err := from.Pod(t.Context(), "default", "web-0")
	check(t, err)
	w, err := from.WatchPods(t.Context(), "1")
	check(t, err)
	defer w.Stop()
	var seen *Pod
	for range 2 {
		switch e := <-w.ResultChan(); o := e.Object.(type) {
		case *Pod:
			seen = o
		case *metav1.Status:
			if e.Type != watch.Error || o.Reason != metav1.StatusReasonExpired {
				t.Errorf("an event %s of %+v", e.Type, o)
			}
		default:
			t.Fatalf("an event %s of %+v", e.Type, o)
		}
	}
	if none, err := from.Pod(t.Context(), "default", "web-1"); none != nil || err != nil {
		t.Errorf("of a pod that does not exist: %+v, %v", none, err)
	}
	is.slim()
	for _, is := range []*Pod{is, seen} {
		is.TypeMeta = want.TypeMeta
		if !equality.Semantic.DeepEqual(is, want) {
			t.Errorf("got %+v, want %+v", is, want)
		}
	}
}
