package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	kruisev1alpha1 "github.com/stayput/stayput/pkg/api/kruise/v1alpha1"
	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/test/lab"
)

// namespace of the workloads.
const namespace = "chaos"

// workload is a StatefulSet or a Deployment and what it is promised.
type workload struct {
	name     string
	replicas int32
	// deployment: its pods have no ordinals.
	deployment bool
	// retain is the annotation retain-ip, empty if addresses are not kept.
	retain   string
	identity string
	// scaledDown: addresses are kept while the pod is not wanted.
	scaledDown bool
	// recorded: a PersistentPodState keeps the nodes.
	recorded bool
	// wait is home-wait, 0 if the default; forever: as long as the address is kept.
	wait time.Duration
}

const (
	forever     = time.Duration(1<<63 - 1)
	defaultWait = 60 * time.Second // of home-wait
)

// sets are the workloads: every kind of promise, and pods without any that take what is free.
var sets = []*workload{
	{name: "ten", replicas: 4, retain: "10m", scaledDown: true},
	{name: "patient", replicas: 3, retain: "10m", scaledDown: true, wait: forever},
	{name: "brief", replicas: 2, retain: "30s", scaledDown: true, wait: 10 * time.Second},
	{name: "owned", replicas: 4, retain: v1alpha1.RetentionWhileOwned, scaledDown: true},
	{name: "wanted", replicas: 3, retain: v1alpha1.RetentionWhileOwned},
	{
		name: "front", deployment: true, replicas: 3,
		retain: v1alpha1.RetentionWhileOwned, identity: "front", scaledDown: true,
	},
	{name: "recorded", replicas: 3, recorded: true},
	{name: "plain", replicas: 6, deployment: true},
}

// setOf returns the workload of a pod by its label, nil if none of ours.
func setOf(pod metav1.Object) *workload {
	for _, w := range sets {
		if pod.GetLabels()["app"] == w.name {
			return w
		}
	}
	return nil
}

// setNamed returns the StatefulSet with that pod, and the pod's ordinal.
func setNamed(pod string) (*workload, int32) {
	name, number, _ := strings.Cut(pod, "-")
	ordinal, err := strconv.ParseInt(number, 10, 32)
	for _, w := range sets {
		if w.name == name && err == nil && !w.deployment {
			return w, int32(ordinal)
		}
	}
	return nil, 0
}

// comesHome reports whether each pod by its name is promised its node.
func (w *workload) comesHome() bool { return !w.deployment && (w.retain != "" || w.recorded) }

// retention is how long an address is kept; forever: while its workload wants the pod.
func (w *workload) retention() time.Duration {
	d, err := time.ParseDuration(w.retain)
	if err != nil {
		return forever
	}
	return d
}

// outlasts reports whether its addresses are kept longer than any fault lasts.
func (w *workload) outlasts() bool { return w.retain != "" && w.retention() >= 5*time.Minute }

// homeWait is how long a pod waits for its home.
func (w *workload) homeWait() time.Duration {
	if w.wait == 0 {
		return defaultWait
	}
	return w.wait
}

func (w *workload) annotations() map[string]string {
	a := map[string]string{}
	if w.retain != "" {
		a[v1alpha1.AnnotationRetainIP] = w.retain
	}
	if w.identity != "" {
		a[v1alpha1.AnnotationIdentity] = w.identity
	}
	if w.retain == v1alpha1.RetentionWhileOwned && w.scaledDown {
		a[v1alpha1.AnnotationWhenScaled] = v1alpha1.PolicyRetain
	}
	switch {
	case w.wait == forever:
		a[v1alpha1.AnnotationHomeWait] = v1alpha1.HomeWaitRetention
	case w.wait != 0:
		a[v1alpha1.AnnotationHomeWait] = w.wait.String()
	}
	return a
}

// object returns the workload for the API server.
func (w *workload) object() client.Object {
	of := lab.Workload{Name: w.name, Replicas: int(w.replicas), Annotations: w.annotations()}
	if w.recorded {
		of.Own = map[string]string{
			kruisev1alpha1.AnnotationAutoGenerate:     "true",
			kruisev1alpha1.AnnotationRequiredTopology: corev1.LabelHostname,
		}
	}
	if w.deployment {
		one := intstr.FromInt32(1)
		of.Kind = "Deployment"
		of.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxUnavailable: &one}
	}
	return of.Object(namespace)
}

func (w *workload) String() string { return fmt.Sprintf("%s (%d pods)", w.name, w.replicas) }
