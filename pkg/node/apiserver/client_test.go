package apiserver

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/stayput/stayput/test/must"
)

// serve is an API server with one answer.
func serve(t *testing.T, code int, answer string) *Client {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/api/v1/nodes/n1" {
			t.Errorf("asked for %s", r.URL)
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		fmt.Fprint(w, answer)
	}))
	t.Cleanup(s.Close)
	c, err := New(&rest.Config{Host: s.URL}, "n1")
	must.Do(t, err)
	return c
}

func missing(resource string) string {
	return fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,`+
		`"details":{"name":"n1","kind":%q}}`, resource)
}

func TestANodeIsRead(t *testing.T) {
	c := serve(t, 200, `{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1","uid":"u"},`+
		`"spec":{"podCIDRs":["10.244.1.0/24","fd00::/64"],"taints":[{"key":"x"}]},`+
		`"status":{"conditions":[{"type":"Ready","status":"True","reason":"KubeletReady"}]}}`)
	uid, err := c.NodeUID(t.Context())
	must.Do(t, err)
	all, err := c.PodCIDRs(t.Context())
	must.Do(t, err)
	n, err := c.Node(t.Context())
	must.Do(t, err)
	want := []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00::/64")}
	if uid != "u" || !slices.Equal(all, want) || len(n.Spec.Taints) != 1 ||
		n.Status.Conditions[0].Reason != "KubeletReady" {
		t.Errorf("UID %s, podCIDRs %v, %+v", uid, all, n)
	}
}

// What is asked for podCIDRs goes on to something else if there are none.
func TestANodeThatDoesNotExistHasNoPodCIDRsThatAreKnown(t *testing.T) {
	c := serve(t, 404, missing("nodes"))
	uid, err := c.NodeUID(t.Context())
	must.Do(t, err)
	n, err := c.Node(t.Context())
	must.Do(t, err)
	if uid != "" || n != nil {
		t.Errorf("UID %s, %+v", uid, n)
	}
	if all, err := c.PodCIDRs(t.Context()); err == nil {
		t.Errorf("podCIDRs %v, and no error", all)
	}
}

func TestAnErrorIsNoAbsenceOfANode(t *testing.T) {
	for _, answer := range []struct {
		code int
		body string
	}{
		{404, missing("namespaces")}, {404, "404 page not found"}, {403, `{"kind":"Status","code":403,"reason":"Forbidden"}`},
		{500, ""}, {200, "{"},
	} {
		c := serve(t, answer.code, answer.body)
		if uid, err := c.NodeUID(t.Context()); err == nil {
			t.Errorf("%v: UID %q, and no error", answer, uid)
		}
		if n, err := c.Node(t.Context()); err == nil {
			t.Errorf("%v: %+v, and no error", answer, n)
		}
	}
}
