package cluster

import (
	"context"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stayput/stayput/test/chart"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

const blockKind = "IPAMBlock.v1.crd.projectcalico.org"

// calicoBlock is the definition of Calico's blocks, without a schema, and a block: its first address is free, the
// second one is web-0's, the third and fourth are web-1's.
const calicoBlock = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: ipamblocks.crd.projectcalico.org}
spec:
  group: crd.projectcalico.org
  scope: Cluster
  names: {kind: IPAMBlock, plural: ipamblocks, singular: ipamblock}
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`

const aBlockOfCalico = `
apiVersion: crd.projectcalico.org/v1
kind: IPAMBlock
metadata: {name: 10-244-240-0-30, labels: {a: b}}
spec:
  cidr: 10.244.240.0/30
  affinity: host:node-1
  deleted: false
  allocations: [null, 0, 1, 1]
  unallocated: [0]
  attributes:
  - {handle_id: aa, secondary: {namespace: default, node: node-1, pod: web-0}}
  - {handle_id: bb, secondary: {namespace: default, node: node-2, pod: web-1}}
  sequenceNumber: 17
  sequenceNumberForAllocation: {"1": 1, "2": 2, "3": 2}
`

// The controller frees an address of a pool; its account may not do more to the block, which has those of other pods.
func TestOfACalicoBlockTheControllerFreesOneAddress(t *testing.T) {
	g := guardedWith(t, true)
	objects, err := chart.Render(testContext(t), "--no-hooks", "--set=pools.enabled=true,pools.calico=true")
	must.Do(t, err)
	var policy strings.Builder
	for _, o := range objects {
		if o.Name == "stayput-calico" {
			policy.WriteString("---\n" + o.Text + "\n")
		}
	}
	apply := func(what, files string) {
		_, err := g.c.Kubectl(testContext(t), files, "apply", "--server-side", "-f", "-")
		must.Do(t, err)
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
			defer cancel()
			if _, err := g.c.Kubectl(ctx, files, "delete", "-f", "-"); err != nil {
				t.Errorf("removing %s: %v", what, err)
			}
		})
	}
	apply("the definition", calicoBlock)
	until(t, "the definition to be served", func(ctx context.Context) bool {
		_, err := g.c.Kubectl(ctx, aBlockOfCalico, "apply", "--server-side", "-f", "-")
		return err == nil
	})
	meta.MaybeResetRESTMapper(g.mapper)
	apply("the policy", policy.String())
	as := g.c.RESTConfigAs("system:serviceaccount:"+lab.SystemNamespace+":stayput-controller", "system:masters")
	const one, others = "may free one address of an IPAMBlock at a time", "may not change whose the other addresses"
	change := func(spec string) try {
		return patch(blockKind, "10-244-240-0-30", types.MergePatchType, "{spec: {"+spec+"}}")
	}
	const aa, bb = "{handle_id: aa, secondary: {namespace: default, node: node-1, pod: web-0}}",
		"{handle_id: bb, secondary: {namespace: default, node: node-2, pod: web-1}}"
	until(t, "the policy", func(ctx context.Context) bool {
		_, err := change("unallocated: []")(ctx, g, as)
		return refused(err, one)
	})
	for _, c := range []struct {
		name, refusal string
		do            try
	}{
		{"it frees the one address of a handle", "", change(
			"allocations: [null, null, 0, 0], unallocated: [0, 1], attributes: [" + bb + "], sequenceNumber: 18, sequenceNumberForAllocation: {'1': null}")},
		{"it frees one of two addresses of a handle", "", change("allocations: [null, 0, null, 1], unallocated: [0, 2]")},
		{"it frees an address and gives another one to another handle", others, change(
			"allocations: [null, null, 0, 0], unallocated: [0, 1], attributes: [{handle_id: cc}]")},
		{"it frees an address and swaps two others", others, change("allocations: [null, 1, null, 0], unallocated: [0, 2]")},
		{"it frees an address and hides that it frees another", others, change(
			"allocations: [null, null, null, 0], attributes: [" + bb + "], unallocated: [0, 2]")},
		{"it frees an address and takes a free one", others, change("allocations: [0, 0, null, 1], unallocated: [0, 2]")},
		{"it frees two addresses", one, change("allocations: [null, null, null, 0], attributes: [" + bb + "], unallocated: [0, 1, 2]")},
		{"it frees none", others, change("unallocated: [0, 1]")},
		{"it takes a free address", one, change("allocations: [0, 0, 1, 1], unallocated: []")},
		{"it changes who has an address", one, change("attributes: [{handle_id: cc}, " + bb + "]")},
		{"it drops the last address", others, change("allocations: [null, 0, null], unallocated: [0, 2]")},
		{"it deletes the block's affinity", one, change("affinity: null, allocations: [null, 0, null, 1], unallocated: [0, 2]")},
		{"it has the block deleted", one, change("deleted: true, attributes: [" + aa + ", " + bb + "]")},
		{"it deletes the block", one, remove(blockKind, "10-244-240-0-30")},
		{"it labels the block", one, patch(blockKind, "10-244-240-0-30", types.MergePatchType, "{metadata: {labels: {a: c}}}")},
	} {
		_, err := c.do(testContext(t), g, as)
		if c.refusal == "" && err != nil || c.refusal != "" && !refused(err, c.refusal) {
			t.Errorf("%s: %v, want %q", c.name, err, c.refusal)
		}
	}
}
