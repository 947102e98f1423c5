package podip

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/pool"
)

// labelRetry is how long after an error namespaces are labelled again. Without the right it is an error each time.
const labelRetry = 5 * time.Second

// labels labels the namespaces that ask for their pods and that the admission policy stayput-default-pools has not
// labelled, until ctx ends: without the label their pods start ungated. The policy labels a namespace in the write that
// makes it ask, but it was not there when some of them were written, or a webhook wrote the annotation.
func (c *follower) labels(ctx context.Context) {
	retry := func(what string, err error) {
		if ctx.Err() == nil {
			log.FromContext(ctx).Error(err, what)
			time.AfterFunc(labelRetry, c.wakeLabels)
		}
	}
	for listed := false; ; {
		if !listed { // later ones come by the watch, but that begins only with the first pool
			err := c.listUnlabelled(ctx)
			if listed = err == nil; !listed {
				retry("Cannot list namespaces", err)
			}
		}
		c.mu.Lock()
		names := c.unlabelled
		c.unlabelled = map[string]struct{}{}
		c.unlock()
		for name := range names {
			if err := c.label(ctx, name); err != nil {
				c.mu.Lock()
				c.unlabelled[name] = struct{}{}
				c.unlock()
				retry("Cannot label a namespace: its pods start without the addresses that its annotations ask for", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-c.toLabel:
		}
	}
}

// listUnlabelled notes the namespaces that lack the label.
func (c *follower) listUnlabelled(ctx context.Context) error {
	for list := metadataList("Namespace"); ; {
		next := list.Continue
		list = metadataList("Namespace")
		if err := c.live.List(ctx, list, client.Limit(500), client.Continue(next)); err != nil {
			return err
		}
		c.mu.Lock()
		for i := range list.Items {
			c.noteUnlabelledLocked(&list.Items[i])
		}
		c.unlock()
		if list.Continue == "" {
			return nil
		}
	}
}

// noteUnlabelledLocked has a namespace labelled if it asks for its pods. Spiderpool's annotations count, as for the
// policy, regardless of whether they do now.
func (c *state) noteUnlabelledLocked(o client.Object) {
	if _, ok := o.GetLabels()[stayputv1alpha1.LabelDefaultPools]; ok || !pool.AsksByDefault(o.GetAnnotations(), true) {
		return
	}
	c.unlabelled[o.GetName()] = struct{}{}
	c.wakeLabels()
}

func (c *state) wakeLabels() {
	select {
	case c.toLabel <- struct{}{}:
	default:
	}
}

// label labels a namespace. If it asks no longer, the policy takes the label off in the same write.
func (c *follower) label(ctx context.Context, name string) error {
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:""}}}`, stayputv1alpha1.LabelDefaultPools)
	o := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
	o.TypeMeta = metadata("Namespace").TypeMeta
	err := client.IgnoreNotFound(c.live.Patch(ctx, o, client.RawPatch(types.MergePatchType, []byte(patch)), owner))
	if err != nil {
		return fmt.Errorf("patching namespace %s: %w", name, err)
	}
	log.FromContext(ctx).Info("Labelled a namespace whose annotations name pools", "namespace", name)
	return nil
}
