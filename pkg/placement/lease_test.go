package placement

import (
	"context"
	"errors"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/utils/ptr"

	"github.com/stayput/stayput/pkg/home"
)

// The lease lasts an hour: a test that waits for its end fails.
func TestALeaderWhosePodIsGoneIsSucceededAtOnce(t *testing.T) {
	const ns = "stayput-system"
	self := home.LeaderIdentity("b", "2")
	for name, c := range map[string]struct {
		holder string
		pod    types.UID // that "a" has, empty if it does not exist
		err    error
		leads  bool
	}{
		"its pod is gone":                       {holder: "a/1", leads: true},
		"a pod of that name is another one":     {holder: "a/1", pod: "9", leads: true},
		"its pod is there":                      {holder: "a/1", pod: "1"},
		"pods cannot be read":                   {holder: "a/1", err: errors.New("the API server is away")},
		"by its name it may be no pod":          {holder: "a_1"},
		"it is this pod, whose container ended": {holder: "b/2", leads: true},
		"it has given the lease back":           {leads: true},
	} {
		t.Run(name, func(t *testing.T) {
			now := metav1.NowMicro()
			client := fake.NewClientset(&coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: home.LeaseName},
				Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To(c.holder), LeaseDurationSeconds: ptr.To[int32](3600),
					AcquireTime: &now, RenewTime: &now}})
			if c.pod != "" {
				if err := client.Tracker().Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "a",
					UID: c.pod}}); err != nil {
					t.Fatal(err)
				}
			}
			client.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
				return c.err != nil, nil, c.err
			})
			lock, err := resourcelock.New(resourcelock.LeasesResourceLock, ns, home.LeaseName, client.CoreV1(),
				client.CoordinationV1(), resourcelock.ResourceLockConfig{Identity: self})
			if err != nil {
				t.Fatal(err)
			}
			ours := podLock{lock, client, ns}
			if record, _, err := ours.Get(t.Context()); err != nil ||
				(record.HolderIdentity == "" || record.HolderIdentity == self) != c.leads {
				t.Fatalf("the holder is %+v, %v", record, err)
			}
			if !c.leads {
				return
			}
			ctx, cancel := context.WithCancel(t.Context())
			leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{Lock: ours, LeaseDuration: time.Hour,
				RenewDeadline: time.Minute, RetryPeriod: time.Second, Callbacks: leaderelection.LeaderCallbacks{
					OnStartedLeading: func(context.Context) { cancel() }, OnStoppedLeading: func() {}}})
		})
	}
}
