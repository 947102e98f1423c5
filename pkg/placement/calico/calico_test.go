package calico

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/stayput/stayput/test/must"
)

// aBlock is an IPAMBlock as Calico 3.31 writes it: the second address is a pod's, the third and fourth are another one's
// of which both have one handle.
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
			is.Attributes = append(is.Attributes, strings.TrimPrefix(a.(map[string]any)["handle_id"].(string), "k8s-pod-network."))
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
		"strict":         {Config{pools: []ipPool{main}, strict: true}, "10.244.240.0/24", "strictAffinity"},
		"being migrated": {Config{pools: []ipPool{main}, locked: true}, "10.244.240.0/24", "datastore is locked"},
	} {
		is := c.config.Refuses(netip.MustParsePrefix(c.subnet))
		if (is == "") != (c.says == "") || !strings.Contains(is, c.says) {
			t.Errorf("%s: %q", name, is)
		}
	}
}
