package calico

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/stayput/stayput/test/must"
)

// aBlock is an IPAMBlock as Calico 3.31 writes it: the second address is a pod's, the third and fourth are another
// one's of which both have one handle.
const aBlock = `{"apiVersion": "crd.projectcalico.org/v1", "kind": "IPAMBlock",
	"metadata": {"name": "10-244-240-0-30", "resourceVersion": "41"},
	"spec": {"cidr": "10.244.240.0/30", "affinity": "host:node-1", "strictAffinity": false, "deleted": false,
		"allocations": [null, 0, 1, 1], "unallocated": [0],
		"attributes": [
			{"handle_id": "k8s-pod-network.aa", "secondary": {"namespace": "default", "node": "node-1", "pod": "web-0"}},
			{"handle_id": "k8s-pod-network.bb", "secondary": {"namespace": "default", "node": "node-2", "pod": "web-1"}}],
		"sequenceNumber": 1761080082041374219,
		"sequenceNumberForAllocation": {"1": 1761080082041374217, "2": 1761080082041374218, "3": 1761080082041374218}}}`

func block30(t *testing.T) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	must.Do(t, o.UnmarshalJSON([]byte(aBlock)))
	return o
}

func TestABlockSaysWhoHasAnAddress(t *testing.T) {
	b, err := blockOf(block30(t))
	must.Do(t, err)
	now := time.Now()
	for a, want := range map[string]string{"10.244.240.0": "", "10.244.240.1": "web-0", "10.244.240.3": "web-1"} {
		is, err := b.allocation(ordinal(b.CIDR, netip.MustParseAddr(a)), "41", now)
		must.Do(t, err)
		if is.Pod != want || (is.Handle == "") != (want == "") || is.At != now {
			t.Errorf("%s: %+v", a, is)
		}
	}
	if _, err := b.allocation(4, "41", now); err == nil {
		t.Error("a block of four addresses has a fifth")
	}
	if name := nameOf(netip.MustParsePrefix("fd00:10:244::/122")); name != "fd00-10-244---122" {
		t.Errorf("the block of fd00:10:244::/122 is %s", name)
	}
}

func TestAnAddressIsFreedAsCalicoDoes(t *testing.T) {
	for ordinal, want := range map[int]string{
		1: `{"allocations": [null, null, 0, 0], "unallocated": [0, 1], "attributes": ["bb"],
			"numbers": {"2": 1761080082041374218, "3": 1761080082041374218}}`,
		2: `{"allocations": [null, 0, null, 1], "unallocated": [0, 2], "attributes": ["aa", "bb"],
			"numbers": {"1": 1761080082041374217, "3": 1761080082041374218}}`,
	} {
		o := block30(t)
		must.Do(t, release(o, ordinal))
		var is, expected struct {
			Allocations, Unallocated []any
			Attributes               []string
			Numbers                  map[string]any
		}
		spec := o.Object["spec"].(map[string]any)
		is.Allocations, is.Unallocated = spec["allocations"].([]any), spec["unallocated"].([]any)
		is.Numbers = spec["sequenceNumberForAllocation"].(map[string]any)
		for _, a := range spec["attributes"].([]any) {
			handle := a.(map[string]any)["handle_id"].(string)
			is.Attributes = append(is.Attributes, strings.TrimPrefix(handle, "k8s-pod-network."))
		}
		d := json.NewDecoder(strings.NewReader(want))
		d.UseNumber()
		must.Do(t, d.Decode(&expected))
		text := func(v any) string {
			b, err := json.Marshal(v)
			must.Do(t, err)
			return string(b)
		}
		if text(is) != text(expected) {
			t.Errorf("without %d: %s, want %s", ordinal, text(is), text(expected))
		}
		if n := spec["sequenceNumber"]; n != int64(1761080082041374220) {
			t.Errorf("the sequence number is %v", n)
		}
		if !reflect.DeepEqual(o.Object["metadata"], block30(t).Object["metadata"]) {
			t.Errorf("the metadata is %v", o.Object["metadata"])
		}
	}
	if err := release(block30(t), 0); err == nil {
		t.Error("an address was freed that is free")
	}
}

func TestASubnetMustBeWholeBlocksOfOneIPPoolThatGivesThemOut(t *testing.T) {
	pool := func(name, cidr string) ipPool {
		p := ipPool{name: name}
		p.Spec.CIDR = netip.MustParsePrefix(cidr)
		return p
	}
	main := pool("main", "10.244.0.0/16")
	disabled, tunnels := main, main
	disabled.Spec.Disabled, tunnels.Spec.AllowedUses = true, []string{"Tunnel"}
	for name, c := range map[string]struct {
		config Config
		subnet string
		says   string // empty: it can be a pool's
	}{
		"whole blocks":   {Config{pools: []ipPool{main}}, "10.244.240.0/24", ""},
		"one block":      {Config{pools: []ipPool{main}}, "10.244.240.0/26", ""},
		"all of it":      {Config{pools: []ipPool{main}}, "10.244.0.0/16", ""},
		"IPv6":           {Config{pools: []ipPool{pool("six", "fd00::/48")}}, "fd00::/120", ""},
		"a part":         {Config{pools: []ipPool{main}}, "10.244.240.0/27", "whole blocks, which are /26"},
		"none":           {Config{pools: []ipPool{main}}, "10.6.0.0/24", "no IPPool of Calico has 10.6.0.0/24"},
		"more":           {Config{pools: []ipPool{main}}, "10.240.0.0/12", "is not within IPPool main"},
		"two":            {Config{pools: []ipPool{main, pool("b", "10.244.240.0/24")}}, "10.244.240.0/24", "IPPools b and main"},
		"disabled":       {Config{pools: []ipPool{disabled}}, "10.244.240.0/24", "is disabled"},
		"tunnels":        {Config{pools: []ipPool{tunnels}}, "10.244.240.0/24", "allowedUses"},
		"cools down":     {Config{pools: []ipPool{main}, cooldown: true}, "10.244.240.0/24", "ipCooldownSeconds"},
		"strict":         {Config{pools: []ipPool{main}, strict: true}, "10.244.240.0/24", "strictAffinity"},
		"being migrated": {Config{pools: []ipPool{main}, locked: true}, "10.244.240.0/24", "datastore is locked"},
	} {
		is := c.config.Refuses(netip.MustParsePrefix(c.subnet))
		if (is == "") != (c.says == "") || !strings.Contains(is, c.says) {
			t.Errorf("%s: %q", name, is)
		}
	}
}

// ipamOf returns the IPAM of a cluster that serves these groups, each with what its ClusterInformation says: ready,
// locked, or nothing. In each an address is allocated to a pod with the group's name, if it has blocks.
func ipamOf(t *testing.T, says map[string]string, blocks bool) *IPAM {
	t.Helper()
	get := func(_ context.Context, _ client.WithWatch, key client.ObjectKey, o client.Object,
		_ ...client.GetOption) error {
		group := o.GetObjectKind().GroupVersionKind().Group
		of := schema.GroupResource{Group: group, Resource: "ipamblocks"}
		into := o.(*unstructured.Unstructured)
		is, served := says[group]
		switch {
		case !served: // as an API server without the definition answers
			return apierrors.NewGenericServerResponse(404, "get", of, key.Name, "404 page not found", 0, true)
		case into.GetKind() == "ClusterInformation" && is != "":
			return unstructured.SetNestedField(into.Object, is == "ready", "spec", "datastoreReady")
		case into.GetKind() == "IPAMBlock" && blocks:
			return into.UnmarshalJSON([]byte(strings.NewReplacer("crd.projectcalico.org/v1", into.GetAPIVersion(), "web-0",
				group).Replace(aBlock)))
		}
		return apierrors.NewNotFound(of, key.Name)
	}
	list := func(_ context.Context, _ client.WithWatch, o client.ObjectList, _ ...client.ListOption) error {
		into := o.(*unstructured.UnstructuredList)
		if into.GetKind() == "IPPoolList" {
			into.Items = []unstructured.Unstructured{{Object: map[string]any{"kind": "IPPool",
				"spec": map[string]any{"cidr": "10.244.0.0/16", "blockSize": int64(30)}}}}
		}
		return nil
	}
	return New(interceptor.NewClient(fake.NewClientBuilder().Build(), interceptor.Funcs{Get: get, List: list}),
		func(gvk schema.GroupVersionKind) (bool, error) { _, served := says[gvk.Group]; return served, nil }, time.Now)
}

func TestTheGroupThatSaysItIsReadyCounts(t *testing.T) {
	const v1, v3 = "crd.projectcalico.org", "projectcalico.org"
	for name, c := range map[string]struct {
		says map[string]string
		want string // the group, or "locked"
	}{
		"as ever":                     {map[string]string{v1: "ready"}, v1},
		"before Calico's first start": {map[string]string{v1: ""}, v1},
		"locked":                      {map[string]string{v1: "locked"}, "locked"},
		"native":                      {map[string]string{v3: "ready"}, v3},
		"Calico's API server":         {map[string]string{v1: "ready", v3: "ready"}, v1},
		"about to be moved":           {map[string]string{v1: "ready", v3: ""}, v1},
		"being moved":                 {map[string]string{v1: "locked", v3: "locked"}, "locked"},
		"being moved, and not there":  {map[string]string{v1: "locked", v3: ""}, "locked"},
		"moved":                       {map[string]string{v1: "locked", v3: "ready"}, v3},
		"the first one is deleted":    {map[string]string{v1: "", v3: "ready"}, v3},
		"neither says so":             {map[string]string{v1: "", v3: ""}, "locked"},
		"none":                        {nil, ErrNotServed.Error()},
	} {
		i := ipamOf(t, c.says, true)
		config, err := i.Read(t.Context())
		is, a := "", netip.MustParseAddr("10.244.240.1")
		switch {
		case err != nil:
			is = err.Error()
		case config.locked:
			is = "locked"
			if _, err := i.Observe(t.Context(), a); !errors.Is(err, ErrLocked) {
				t.Errorf("%s: an address is observed: %v", name, err)
			}
		default:
			is = config.gv.Group
			if has, err := i.Observe(t.Context(), a); err != nil || has.Pod != is {
				t.Errorf("%s: %+v, %v", name, has, err)
			}
		}
		if is != c.want {
			t.Errorf("%s: %s, want %s", name, is, c.want)
		}
	}
}

// Blocks go with their definition, and Calico deletes the one group once the other one has them.
func TestABlockWithoutADefinitionIsNotFree(t *testing.T) {
	const v1 = "crd.projectcalico.org"
	says := map[string]string{v1: "ready"}
	i, a := ipamOf(t, says, false), netip.MustParseAddr("10.244.240.1")
	_, err := i.Read(t.Context())
	must.Do(t, err)
	if is, err := i.Observe(t.Context(), a); err != nil || is.Handle != "" {
		t.Errorf("without the block: %+v, %v", is, err)
	}
	delete(says, v1)
	if is, err := i.Observe(t.Context(), a); err == nil {
		t.Errorf("without the definition: %+v", is)
	}
}

func TestNothingIsFreedInALockedDatastore(t *testing.T) {
	const v1 = "crd.projectcalico.org"
	says := map[string]string{v1: "ready"}
	i, a := ipamOf(t, says, true), netip.MustParseAddr("10.244.240.1")
	_, err := i.Read(t.Context())
	must.Do(t, err)
	is, err := i.Observe(t.Context(), a)
	must.Do(t, err)
	says[v1] = "locked"
	if err := i.Free(t.Context(), a, is); !errors.Is(err, ErrLocked) {
		t.Errorf("it was tried: %v", err)
	}
}
