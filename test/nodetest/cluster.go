package nodetest

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/installation"
	"github.com/stayput/stayput/test/must"
)

// Name names a RetainedIP.
type Name struct{ Namespace, Name string }

// Event has the fields of an Event that tests check.
type Event struct {
	EventTime           metav1.MicroTime
	Reason              string
	Action              string
	Note                string
	Regarding           Reference
	ReportingController string
	ReportingInstance   string
}

// Reference is the object of an Event.
type Reference struct {
	APIVersion, Kind, Namespace, Name string
	UID                               types.UID
}

// Cluster is the part of an API server that an agent uses, for what a real one does not do on demand: refuse requests,
// lose objects, have no Node. test/cluster covers the rest.
type Cluster struct {
	t testing.TB
	*httptest.Server
	Mu      sync.Mutex // of the fields below
	Objects map[Name]*v1alpha1.RetainedIP
	Events  []Event
	Version int
	Node    types.UID // empty if there is no Node
	// answer returns a status to refuse a request, or nil.
	answer  func(*http.Request) *metav1.Status
	Watches map[chan metav1.WatchEvent]bool
	// Installed is the UID of the installation's ConfigMap, empty if there is none; Followers watch it.
	Installed   types.UID
	annotations map[string]string // of that ConfigMap
	Followers   map[chan metav1.WatchEvent]bool
	Drops       func(*v1alpha1.RetainedIP) // removes fields that the definition lacks
	asked       []string                   // method and path of every request
}

// StartCluster starts an API server that serves what an agent requests.
func StartCluster(t testing.TB) *Cluster {
	t.Helper()
	c := &Cluster{t: t, Objects: map[Name]*v1alpha1.RetainedIP{}, Node: "node-uid", Version: 100,
		annotations: map[string]string{},
		Watches:     map[chan metav1.WatchEvent]bool{}, Followers: map[chan metav1.WatchEvent]bool{}}
	mux := http.NewServeMux()
	const all = "/apis/stayput.io/v1alpha1/retainedips"
	const one = "/apis/stayput.io/v1alpha1/namespaces/{ns}/retainedips/{name}"
	mux.HandleFunc("GET "+all, c.list)
	mux.HandleFunc("GET /apis/stayput.io/v1alpha1/namespaces/default/retainedips", c.list)
	mux.HandleFunc("GET "+one, c.get)
	mux.HandleFunc("PATCH "+one, c.apply)
	mux.HandleFunc("DELETE "+one, c.delete)
	mux.HandleFunc("GET /api/v1/nodes/n1", c.getNode)
	mux.HandleFunc("GET /api/v1/namespaces/stayput-system/configmaps", c.installation)
	mux.HandleFunc("POST /apis/events.k8s.io/v1/namespaces/{ns}/events", func(w http.ResponseWriter, r *http.Request) {
		var e Event
		if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
			t.Error(err)
		}
		c.Mu.Lock()
		c.Events = append(c.Events, e)
		c.Mu.Unlock()
		fmt.Fprint(w, `{"apiVersion":"events.k8s.io/v1","kind":"Event"}`)
	})
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.Mu.Lock()
		c.asked = append(c.asked, r.Method+" "+r.URL.Path)
		answer := c.answer
		c.Mu.Unlock()
		if answer != nil {
			if s := answer(r); s != nil {
				refuse(w, s)
				return
			}
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		c.EndWatches(nil)
		c.Server.Close()
	})
	return c
}

func refuse(w http.ResponseWriter, s *metav1.Status) {
	s.TypeMeta, s.Status = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, metav1.StatusFailure
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(s.Code))
	json.NewEncoder(w).Encode(s)
}

func say(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}

// NotFound returns the status for an object that does not exist.
func NotFound(resource, name string) *metav1.Status {
	return &metav1.Status{
		Code: 404, Reason: metav1.StatusReasonNotFound, Details: &metav1.StatusDetails{Kind: resource, Name: name},
	}
}

// Forbidden returns the status for a missing permission.
func Forbidden() *metav1.Status {
	return &metav1.Status{Code: 403, Reason: metav1.StatusReasonForbidden}
}

func keyOf(r *http.Request) Name { return Name{r.PathValue("ns"), r.PathValue("name")} }

func (c *Cluster) list(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("watch") != "" {
		c.watch(w, r)
		return
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	l := v1alpha1.RetainedIPList{TypeMeta: metav1.TypeMeta{APIVersion: "stayput.io/v1alpha1", Kind: "RetainedIPList"}}
	l.ResourceVersion = strconv.Itoa(c.Version)
	if r.URL.Query().Get("fieldSelector") == "spec.nodeName=n1" {
		for _, o := range c.Objects {
			if ofNode(o) {
				l.Items = append(l.Items, *o)
			}
		}
	}
	say(w, l)
}

// ofNode reports whether the agent's field selector selects an object.
func ofNode(o *v1alpha1.RetainedIP) bool { return o.Spec.NodeName == "" || o.Spec.NodeName == "n1" }

func (c *Cluster) watch(w http.ResponseWriter, r *http.Request) {
	ch := make(chan metav1.WatchEvent, 100)
	c.Mu.Lock()
	c.Watches[ch] = true
	c.Mu.Unlock()
	serveWatch(w, r, ch)
}

func serveWatch(w http.ResponseWriter, r *http.Request, ch chan metav1.WatchEvent) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case e, ok := <-ch:
			if !ok {
				return
			}
			json.NewEncoder(w).Encode(e)
			w.(http.Flusher).Flush()
		}
	}
}

// tell notifies all watches; the caller holds the lock.
func (c *Cluster) tell(kind string, v any) {
	raw, err := json.Marshal(v)
	must.Do(c.t, err)
	for ch := range c.Watches {
		e := metav1.WatchEvent{Type: kind}
		e.Object.Raw = raw
		ch <- e
	}
}

// EndWatches ends every watch, with an error unless s is nil.
func (c *Cluster) EndWatches(s *metav1.Status) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if s != nil {
		s.TypeMeta, s.Status = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, metav1.StatusFailure
		c.tell("ERROR", s)
	}
	for ch := range c.Watches {
		close(ch)
	}
	clear(c.Watches)
	for ch := range c.Followers {
		close(ch)
	}
	clear(c.Followers)
}

func (c *Cluster) get(w http.ResponseWriter, r *http.Request) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if o := c.Objects[keyOf(r)]; o != nil {
		say(w, o)
		return
	}
	refuse(w, NotFound("retainedips", keyOf(r).Name))
}

func (c *Cluster) apply(w http.ResponseWriter, r *http.Request) {
	var o v1alpha1.RetainedIP
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		c.t.Error(err)
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	was := c.Objects[keyOf(r)]
	if was == nil && (o.UID != "" || o.ResourceVersion != "") ||
		was != nil && o.ResourceVersion != "" && o.ResourceVersion != was.ResourceVersion {
		refuse(w, &metav1.Status{Code: 409, Reason: metav1.StatusReasonConflict})
		return
	}
	kind := "ADDED"
	o.UID = types.UID(fmt.Sprint("uid-", c.Version+1))
	if was != nil {
		kind, o.UID, o.Spec.Release = "MODIFIED", was.UID, was.Spec.Release
	}
	if c.Drops != nil {
		c.Drops(&o)
	}
	c.putLocked(kind, &o)
	say(w, o)
}

func (c *Cluster) putLocked(kind string, o *v1alpha1.RetainedIP) {
	c.Version++
	o.TypeMeta = metav1.TypeMeta{APIVersion: "stayput.io/v1alpha1", Kind: "RetainedIP"}
	o.ResourceVersion = strconv.Itoa(c.Version)
	c.Objects[Name{o.Namespace, o.Name}] = o
	if ofNode(o) {
		c.tell(kind, o)
	}
}

// Put stores an object and notifies the watches.
func (c *Cluster) Put(o *v1alpha1.RetainedIP) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	kind := "ADDED"
	if c.Objects[Name{o.Namespace, o.Name}] != nil {
		kind = "MODIFIED"
	}
	c.putLocked(kind, o)
}

func (c *Cluster) delete(w http.ResponseWriter, r *http.Request) {
	var o metav1.DeleteOptions
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil {
		c.t.Error(err)
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	was := c.Objects[keyOf(r)]
	switch {
	case was == nil:
		refuse(w, NotFound("retainedips", keyOf(r).Name))
	case o.Preconditions == nil || *o.Preconditions.UID != was.UID ||
		o.Preconditions.ResourceVersion != nil && *o.Preconditions.ResourceVersion != was.ResourceVersion:
		refuse(w, &metav1.Status{Code: 409, Reason: metav1.StatusReasonConflict})
	default:
		c.RemoveLocked(keyOf(r))
		say(w, metav1.Status{Status: metav1.StatusSuccess})
	}
}

// RemoveLocked deletes an object and notifies the watches; the caller holds Mu.
func (c *Cluster) RemoveLocked(key Name) {
	c.Version++
	o := c.Objects[key]
	o.ResourceVersion = strconv.Itoa(c.Version)
	delete(c.Objects, key)
	if ofNode(o) {
		c.tell("DELETED", o)
	}
}

func (c *Cluster) getNode(w http.ResponseWriter, _ *http.Request) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if c.Node == "" {
		refuse(w, NotFound("nodes", "n1"))
		return
	}
	say(w, metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: c.Node}})
}

// Object returns the current RetainedIP of a pod, or nil if there is none.
func (c *Cluster) Object(pod string) *v1alpha1.RetainedIP {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if o := c.Objects[Name{"default", v1alpha1.RetainedIPName(pod, "n1")}]; o != nil {
		return o.DeepCopy()
	}
	return nil
}

// Count returns the number of requests so far whose method and path begin with what.
func (c *Cluster) Count(what string) (n int) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	for _, a := range c.asked {
		if strings.HasPrefix(a, what) {
			n++
		}
	}
	return n
}

// Answers has f answer requests: if it returns a status, the request is refused with it.
func (c *Cluster) Answers(f func(*http.Request) *metav1.Status) {
	c.Mu.Lock()
	c.answer = f
	c.Mu.Unlock()
}

func (c *Cluster) configMap(uid types.UID) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "stayput-system", Name: installation.ConfigMap, UID: uid, ResourceVersion: strconv.Itoa(c.Version),
			Annotations: maps.Clone(c.annotations),
		},
	}
}

func (c *Cluster) installation(w http.ResponseWriter, r *http.Request) {
	c.Mu.Lock()
	if r.URL.Query().Get("watch") != "" {
		ch := make(chan metav1.WatchEvent, 10)
		c.Followers[ch] = true
		if c.Installed != "" && r.URL.Query().Get("resourceVersion") != strconv.Itoa(c.Version) {
			ch <- c.eventLocked("MODIFIED", c.Installed) // what came between list and watch
		}
		c.Mu.Unlock()
		serveWatch(w, r, ch)
		return
	}
	defer c.Mu.Unlock()
	l := metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"},
	}
	l.ResourceVersion = strconv.Itoa(c.Version)
	if c.Installed != "" {
		l.Items = append(l.Items, *c.configMap(c.Installed))
	}
	say(w, l)
}

// Install creates the installation's ConfigMap, which says nothing yet.
func (c *Cluster) Install(uid types.UID) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	clear(c.annotations)
	c.Installed = uid
	c.tellFollowersLocked("ADDED", uid)
}

// Prune deletes the installation's ConfigMap.
func (c *Cluster) Prune() {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	was := c.Installed
	c.Installed = ""
	c.tellFollowersLocked("DELETED", was)
}

// Uninstall annotates the installation's ConfigMap: Stayput is being uninstalled.
func (c *Cluster) Uninstall() { c.annotate(installation.AnnotationUninstall, true) }

// KeepInstalled takes that annotation away.
func (c *Cluster) KeepInstalled() { c.annotate(installation.AnnotationUninstall, false) }

// SetPools annotates the installation's ConfigMap as the controller does.
func (c *Cluster) SetPools(are bool) { c.annotate(v1alpha1.AnnotationPools, are) }

// SetRouted annotates it as the controller does if a pool is of mode Routed.
func (c *Cluster) SetRouted(are bool) { c.annotate(v1alpha1.AnnotationRoutedPools, are) }

func (c *Cluster) annotate(key string, set bool) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if delete(c.annotations, key); set {
		c.annotations[key] = "true"
	}
	c.tellFollowersLocked("MODIFIED", c.Installed)
}

// AwaitFollower waits until an agent watches the installation's ConfigMap.
func (c *Cluster) AwaitFollower() {
	must.Eventually(c.t, "the agent follows the installation", func() bool {
		c.Mu.Lock()
		defer c.Mu.Unlock()
		return len(c.Followers) > 0
	})
}

// tellFollowersLocked tells those who watch the installation's ConfigMap.
func (c *Cluster) tellFollowersLocked(kind string, uid types.UID) {
	c.Version++
	for ch := range c.Followers {
		ch <- c.eventLocked(kind, uid)
	}
}

func (c *Cluster) eventLocked(kind string, uid types.UID) metav1.WatchEvent {
	e := metav1.WatchEvent{Type: kind}
	var err error
	e.Object.Raw, err = json.Marshal(c.configMap(uid))
	must.Do(c.t, err)
	return e
}
