package podip

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/pool"
)

// announcer tells the agents whether there are pools.
type announcer struct {
	*writer
	installation types.NamespacedName
}

// announces tells the agents whether there are pools until ctx ends, by an annotation of the installation: they watch
// that anyway, and nothing of pools before. While there are pools, it writes the annotation again with each mark, in
// case it was removed.
func (c *announcer) announces(ctx context.Context) {
	if c.installation.Name == "" {
		return
	}
	tick := time.NewTicker(pool.MarkEvery)
	defer tick.Stop()
	none := false // this was said
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.toTell:
		case <-tick.C:
		}
		c.mu.Lock()
		are, known := c.hasLocked(), (c.served == idle || c.served == serving) && c.words != unknown
		c.unlock()
		if !known || are == (has{}) && none {
			continue
		}
		err := c.tell(ctx, are)
		if none = are == (has{}) && err == nil; err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Cannot announce whether the cluster has pools")
			time.AfterFunc(time.Second, c.announce)
		}
	}
}

// tell tells the agents whether there are pools.
func (c *announcer) tell(ctx context.Context, are has) error {
	annotations := map[string]any{stayputv1alpha1.AnnotationPools: nil, stayputv1alpha1.AnnotationRoutedPools: nil,
		stayputv1alpha1.AnnotationCalicoSubnets: nil}
	if are.served != "" {
		annotations[stayputv1alpha1.AnnotationPools] = are.served
	}
	if are.routed {
		annotations[stayputv1alpha1.AnnotationRoutedPools] = "true"
	}
	if are.calico != "" {
		annotations[stayputv1alpha1.AnnotationCalicoSubnets] = are.calico
	}
	if are.unread { // what was told stands
		delete(annotations, stayputv1alpha1.AnnotationCalicoSubnets)
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": annotations}})
	if err != nil {
		return err
	}
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.installation.Namespace, Name: c.installation.Name}}
	err = c.client.Patch(ctx, o, client.RawPatch(types.MergePatchType, patch), owner)
	if err = client.IgnoreNotFound(err); err != nil { // somebody has deleted it
		return fmt.Errorf("patching ConfigMap %s: %w", c.installation, err)
	}
	return nil
}
