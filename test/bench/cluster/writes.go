package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

// The API server logs every write once it has answered it.
const (
	auditPolicyFile = "/etc/kubernetes/audit-policy.yaml"
	auditLog        = "/var/log/audit.log"
	auditPolicy     = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: None
`
)

// write is a line of the audit log.
type write struct {
	Verb string `json:"verb"`
	URI  string `json:"requestURI"`
	User struct {
		Username string `json:"username"`
	} `json:"user"`
	ObjectRef struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	At time.Time `json:"requestReceivedTimestamp"`
}

// what returns the write without its object.
func (w write) what() string {
	s := w.Verb + " " + w.ObjectRef.Resource
	if w.ObjectRef.Subresource != "" {
		s += "/" + w.ObjectRef.Subresource
	}
	if w.ResponseStatus.Code >= 300 {
		s += fmt.Sprintf(" (answered %d)", w.ResponseStatus.Code)
	}
	return s
}

// audit reads the writes since an offset of the log, and returns the log's end.
func (w *world) audit(since int64) ([]write, int64, error) {
	data, err := os.ReadFile(w.Control.Path(auditLog))
	if err != nil {
		return nil, 0, err
	}
	data = data[since:]
	if end := bytes.LastIndexByte(data, '\n'); end >= 0 {
		data = data[:end+1]
	}
	var all []write
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		var one write
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			return nil, 0, fmt.Errorf("the audit log: %w", err)
		}
		all = append(all, one)
	}
	return all, since + int64(len(data)), nil
}

const (
	controllerUser = "system:serviceaccount:" + lab.SystemNamespace + ":" + lab.ControllerAccount
	agentUser      = "system:serviceaccount:" + lab.SystemNamespace + ":" + lab.AgentAccount
)

// tally counts a user's writes in one namespace by kind.
func tally(all []write, user, namespace string) (sum int, detail map[string]int) {
	detail = map[string]int{}
	for _, one := range all {
		if one.User.Username != user || one.ObjectRef.Namespace != namespace || one.ObjectRef.Resource == "events" {
			continue
		}
		sum++
		detail[one.what()]++
	}
	return sum, detail
}

func spell(detail map[string]int, n int) string {
	var s []string
	for _, what := range slices.Sorted(maps.Keys(detail)) {
		s = append(s, fmt.Sprintf("%s %.2f", what, float64(detail[what])/float64(n)))
	}
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, ", ")
}

func measureWrites(ctx context.Context, b *bench) (rows []table.Row, err error) {
	w, err := b.startInstalled(ctx, lab.ClusterOptions{
		APIServerArgs: []string{"--audit-policy-file=" + auditPolicyFile, "--audit-log-path=" + auditLog},
		ControlFiles:  map[string][]byte{auditPolicyFile: []byte(auditPolicy)},
	}, twoControllers)
	if err != nil {
		return nil, err
	}
	defer func() { err = w.end(ctx, err) }()

	state := map[string]string{
		kruisev1alpha1.AnnotationAutoGenerate: "true", kruisev1alpha1.AnnotationPreferredTopology: corev1.LabelHostname,
	}
	const pods = 6
	kinds := []struct {
		name        string
		own, ofPods map[string]string
		what        string
	}{
		{"annotated", nil, map[string]string{"stayput.io/retain-ip": "10m"}, "retain-ip"},
		{"recorded", state, nil, "PersistentPodState"},
		{
			"both", state, map[string]string{"io.kubernetes.cri/reserved-ip-duration": "10"},
			"PersistentPodState and reserved-ip-duration",
		},
	}
	followers := map[string]*follower{}
	for _, k := range kinds {
		if err := w.namespace(ctx, k.name); err != nil {
			return nil, err
		}
		if followers[k.name], err = w.follow(ctx, k.name); err != nil {
			return nil, err
		}
		set := lab.Workload{Name: "web", Replicas: pods, Own: k.own, Annotations: k.ofPods}
		if err := w.client.Create(ctx, set.Object(k.name)); err != nil {
			return nil, err
		}
		if _, err := followers[k.name].allReady(ctx, pods, nil); err != nil {
			return nil, err
		}
		if k.ofPods != nil {
			if err := w.published(ctx, k.name, followers[k.name].ready); err != nil {
				return nil, err
			}
		}
	}
	// Writes still in progress belong to the first creation.
	if err := sleep(ctx, 5*time.Second); err != nil {
		return nil, err
	}
	_, offset, err := w.audit(0)
	if err != nil {
		return nil, err
	}

	// Every pod alone, one after another, then all at once.
	rounds := b.times(5)
	began := time.Now()
	for round := range rounds {
		say("writes: round %d of %d", round+1, rounds)
		for _, k := range kinds {
			f := followers[k.name]
			again := func(which map[string]place) error {
				before := maps.Clone(f.ready)
				if err := w.deleteAll(ctx, k.name, which); err != nil {
					return err
				}
				_, err := f.until(ctx, "the new pods to be Ready", func() bool {
					for name := range which {
						if p, ok := f.ready[name]; !ok || p.uid == before[name].uid {
							return false
						}
					}
					return true
				})
				if err != nil {
					return err
				}
				if k.ofPods == nil {
					return nil
				}
				if nodes, _, ips := kept(before, f.ready); nodes != pods || ips != pods {
					say("writes: of %d %s pods %d kept their node, %d their IP too", pods, k.name, nodes, ips)
				}
				return w.published(ctx, k.name, f.ready)
			}
			for name, p := range maps.Clone(f.ready) {
				if err := again(map[string]place{name: p}); err != nil {
					return nil, err
				}
			}
			if err := again(maps.Clone(f.ready)); err != nil {
				return nil, err
			}
		}
	}
	// A sandbox's last DELs come up to a minute later.
	if err := sleep(ctx, time.Duration(min(1, b.scale)*60*float64(time.Second))); err != nil {
		return nil, err
	}
	all, _, err := w.audit(offset)
	if err != nil {
		return nil, err
	}
	seconds := time.Since(began).Seconds()
	n := rounds * pods * 2
	for _, k := range kinds {
		for _, who := range []struct{ name, user string }{{"controller", controllerUser}, {"agent", agentUser}} {
			sum, detail := tally(all, who.user, k.name)
			if k.ofPods == nil && who.name == "agent" && sum == 0 {
				continue // no node is promised
			}
			rows = append(rows, table.Row{
				What: "API writes per re-creation, " + who.name, Against: k.what, Goal: table.AtMost(2),
				Figure: table.Figure{Value: float64(sum) / float64(n), Unit: " writes", N: n}, Detail: spell(detail, n),
			})
		}
	}
	for _, who := range []struct{ name, user string }{{"controllers", controllerUser}, {"agents", agentUser}} {
		sum, detail := tally(all, who.user, lab.SystemNamespace)
		other, more := tally(all, who.user, "")
		maps.Copy(detail, more)
		sum += other
		rows = append(rows, table.Row{
			What: "  besides, per minute, " + who.name, Against: "not for a pod", Figure: table.Figure{
				Value: float64(sum) / seconds * 60, Unit: " writes", N: 1,
			},
			Detail: spell(detail, int(seconds/60)+1),
		})
	}
	more, err := w.withoutAgents(ctx, b, kinds[0].name, followers[kinds[0].name])
	return append(rows, more...), err
}

// withoutAgents measures whether pods wait for agents' writes: the API server refuses them in turns. The pods' homes
// are already known.
func (w *world) withoutAgents(ctx context.Context, b *bench, namespace string, f *follower) ([]table.Row, error) {
	binding := &rbacv1.ClusterRoleBinding{}
	if err := w.client.Get(ctx, types.NamespacedName{Name: lab.AgentAccount}, binding); err != nil {
		return nil, err
	}
	binding = &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: binding.Name, Labels: binding.Labels}, RoleRef: binding.RoleRef,
		Subjects: binding.Subjects,
	}
	allow := func(yes bool) error {
		var err error
		if yes {
			err = w.client.Create(ctx, binding.DeepCopy())
		} else {
			err = w.client.Delete(ctx, binding.DeepCopy())
		}
		if err != nil {
			return err
		}
		return until(ctx, "the agents' rights to change", func() (bool, error) {
			review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User: agentUser, ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: "patch", Group: "stayput.io", Resource: "retainedips", Namespace: namespace,
				},
			}}
			err := w.client.Create(ctx, review)
			return review.Status.Allowed == yes, err
		})
	}
	_, offset, err := w.audit(0)
	if err != nil {
		return nil, err
	}
	n := b.times(12)
	var times [2][]float64
	const refused, allowed = 0, 1
	lost := 0
	for i := range 2 * n {
		which := allowed
		if (i+i/2)%2 == 0 { // in turns, reversing the order each time
			which = refused
		}
		if which == refused {
			if err := allow(false); err != nil {
				return nil, err
			}
		}
		name := podName(i % len(f.ready))
		before := maps.Clone(f.ready)
		begin := time.Now()
		if err := w.deleteAll(ctx, namespace, map[string]place{name: before[name]}); err != nil {
			return nil, err
		}
		at, err := f.until(ctx, "pod "+name+" to be Ready", func() bool {
			p, ok := f.ready[name]
			return ok && p.uid != before[name].uid
		})
		if err != nil {
			return nil, err
		}
		times[which] = append(times[which], at.Sub(begin).Seconds()*1e3)
		if _, _, ips := kept(before, f.ready); ips != len(before) {
			lost++
		}
		if which == refused {
			if err := allow(true); err != nil {
				return nil, err
			}
		}
		if err := w.published(ctx, namespace, f.ready); err != nil {
			return nil, err
		}
	}
	all, _, err := w.audit(offset)
	if err != nil {
		return nil, err
	}
	tries := 0
	for _, one := range all {
		if one.User.Username == agentUser && one.ResponseStatus.Code == 403 {
			tries++
		}
	}
	if tries == 0 {
		return nil, errors.New("no write by an agent was refused")
	}
	return []table.Row{{
		What: "deleted -> Ready, every write of the agents refused", Against: "the same with the agents' writes",
		Figure: measured("", ratio, times[refused], times[allowed]),
		Detail: fmt.Sprintf("%s / %s; %d of %d re-creations lost their node or IP; %d writes refused",
			extent("%.0f ms", times[refused]), extent("%.0f ms", times[allowed]), lost, 2*n, tries),
	}}, nil
}
