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
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.toLabel:
		}
		c.mu.Lock()
		names := c.unlabelled
		c.unlabelled = map[string]struct{}{}
		c.unlock()
		for name := range names {
			err := c.label(ctx, name)
			if err == nil || ctx.Err() != nil {
				continue
			}
			log.FromContext(ctx).Error(err, "Cannot label a namespace: its pods start without addresses of its pools")
			c.mu.Lock()
			c.unlabelled[name] = struct{}{}
			c.unlock()
			time.AfterFunc(labelRetry, c.wakeLabels)
		}
	}
}

// toBeLabelled feeds the namespaces that lack the label. It begins before there is a pool, unlike what feeds a Book.
func (c *follower) toBeLabelled() *feed {
	return &feed{c: c.state,
		set:    c.noteUnlabelledLocked,
		remove: func(client.Object, string) {},
		all:    func() []string { return nil },
		end:    func(string, string) {},
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
