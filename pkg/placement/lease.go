package placement

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	clientcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/tools/record"

	"github.com/stayput/stayput/pkg/home"
)

// podLock is the lock of the leader election among pods. Its identities name pods: a lease whose holder's pod is
// deleted, or runs another process by now, is free at once, and gated pods wait no lease for the next leader. One that
// was deleted by force may still lead beside the next leader, until it fails to renew the lease. That is as safe as a
// leader whose lease has expired while it was suspended: every write is bound to the version that it was decided on.
type podLock struct {
	resourcelock.Interface
	pods      kubernetes.Interface
	namespace string
}

// Pod names the pod that a process runs in.
type Pod struct {
	types.NamespacedName
	UID types.UID
}

// newPodLock returns the lock of a pod, on the lease in a namespace.
func newPodLock(config *rest.Config, namespace string, pod Pod) (resourcelock.Interface, error) {
	config = rest.AddUserAgent(rest.CopyConfig(config), "leader-election")
	config.Timeout = renewDeadline / 2 // a single request that hangs must not cost the lease
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	broadcaster := record.NewBroadcaster()
	broadcaster.StartRecordingToSink(&clientcorev1.EventSinkImpl{Interface: client.CoreV1().Events(namespace)})
	lock, err := resourcelock.New(resourcelock.LeasesResourceLock, namespace, home.LeaseName, client.CoreV1(),
		client.CoordinationV1(), resourcelock.ResourceLockConfig{Identity: home.LeaderIdentity(pod.Name, pod.UID),
			EventRecorder: broadcaster.NewRecorder(Scheme, corev1.EventSource{Component: home.LeaseName})})
	return podLock{lock, client, pod.Namespace}, err
}

// Get returns the record of the lease, without a holder whose pod is gone. The elector compares the raw record, which
// is as it was read.
func (l podLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	record, raw, err := l.Interface.Get(ctx)
	if err == nil && record.HolderIdentity != l.Identity() && l.gone(ctx, record.HolderIdentity) {
		record.HolderIdentity = ""
	}
	return record, raw, err
}

// gone reports whether an identity names a pod that certainly no longer exists.
func (l podLock) gone(ctx context.Context, identity string) bool {
	name, uid, isPod := home.LeaderOf(identity)
	if !isPod {
		return false
	}
	pod, err := l.pods.CoreV1().Pods(l.namespace).Get(ctx, name, metav1.GetOptions{})
	return apierrors.IsNotFound(err) || err == nil && pod.UID != uid
}
