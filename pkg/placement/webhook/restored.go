package webhook

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"

	"github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
	"github.com/stayput/stayput/pkg/home"
)

// calicoAddresses is the annotation by which a pod asks Calico's plugin for its addresses.
const calicoAddresses = "cni.projectcalico.org/ipAddrs"

// written is what Stayput writes among the annotations of a pod. All others are skipped.
type written struct {
	Addresses *string `json:"stayput.io/addresses"`
	Pinned    *string `json:"stayput.io/pinned"`
	Calico    *string `json:"cni.projectcalico.org/ipAddrs"`
}

// affinity is the node affinity of a pod, as far as Stayput writes to it, or does not.
type affinity struct {
	NodeAffinity struct {
		Required struct {
			Terms json.RawMessage `json:"nodeSelectorTerms"`
		} `json:"requiredDuringSchedulingIgnoredDuringExecution"`
	}
}

// copied is the patch that takes off a copy of a pod what Stayput wrote on the pod, as the policy stayput-restored
// does.
func copied(_ context.Context, of *review) (ops []jsonpatch.Operation, err error) {
	is := of.Request.Object.Metadata.Annotations
	remove := func(key string) {
		path := "/metadata/annotations/" + strings.ReplaceAll(key, "/", "~1")
		ops = append(ops, jsonpatch.NewOperation("remove", path, nil))
	}
	if is.Addresses != nil {
		remove(v1alpha1.AnnotationAddresses)
		if is.Calico != nil && strings.Contains(*is.Addresses, `"mode":"Calico"`) {
			remove(calicoAddresses)
		}
	}
	raw := of.Request.Object.Spec.Affinity.NodeAffinity.Required.Terms
	if is.Pinned == nil {
		return ops, nil
	}
	remove(v1alpha1.AnnotationPinned)
	if len(raw) == 0 {
		return ops, nil
	}
	var terms list[corev1.NodeSelectorTerm]
	if err := json.Unmarshal(raw, &terms); err != nil {
		return nil, fmt.Errorf("reading the pod's node affinity: %w", err)
	}
	const required = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution"
	switch own := home.Unpinned(terms, *is.Pinned); {
	case len(terms) == 0:
	case len(own) == 0:
		ops = append(ops, jsonpatch.NewOperation("remove", required, nil))
	default:
		ops = append(ops, jsonpatch.NewOperation("replace", required+"/nodeSelectorTerms", own))
	}
	return ops, nil
}
