package netconf

import (
	"fmt"
	"testing"
)

// A word without a pool asks for none: so a pod does without what its namespace asks for.
func TestAPodAsksForPoolsByItsAnnotations(t *testing.T) {
	for annotation, want := range map[string]bool{
		`"stayput.io/pools":"blue"`:                          true,
		`"stayput.io/pools":""`:                              false,
		`"ipam.spidernet.io/ippool":"{}"`:                    true,
		`"ipam.spidernet.io/ippools":"[]"`:                   true,
		`"ipam.spidernet.io/subnet":"{}"`:                    true,
		`"ipam.spidernet.io/subnets":"[]"`:                   true,
		`"ipam.spidernet.io/subnets":""`:                     false,
		`"stayput.io/pools":"","ipam.spidernet.io/ippool":1`: true,
		`"stayput.io/retain-ip":"10m"`:                       false,
	} {
		c, err := Parse(fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"net","ipam":{"type":"stayput"},
			"runtimeConfig":{%q:{%s}}}`, AnnotationsCapability, annotation))
		if err != nil {
			t.Fatal(err)
		}
		if p, err := c.Pools(); err != nil || p.Asked != want || p.Network || p.Static || p.Text != "" {
			t.Errorf("%s: %+v, %v; want asked %t", annotation, p, err, want)
		}
	}
}
