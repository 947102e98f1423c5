package netconf

import (
	"fmt"
	"testing"
)

// An empty annotation asks for none: so a pod does without what its namespace asks for. Spiderpool's annotations are
// told apart, because they count in some clusters only.
func TestAPodAsksForPoolsByItsAnnotations(t *testing.T) {
	ours, theirs, none := Pools{Asked: true}, Pools{AskedSpiderpool: true}, Pools{}
	for annotation, want := range map[string]Pools{
		`"stayput.io/pools":"blue"`:                          ours,
		`"stayput.io/pools":""`:                              none,
		`"ipam.spidernet.io/ippool":"{}"`:                    theirs,
		`"ipam.spidernet.io/ippools":"[]"`:                   theirs,
		`"ipam.spidernet.io/subnet":"{}"`:                    theirs,
		`"ipam.spidernet.io/subnets":"[]"`:                   theirs,
		`"ipam.spidernet.io/subnets":""`:                     none,
		`"stayput.io/pools":"","ipam.spidernet.io/ippool":1`: theirs,
		`"stayput.io/retain-ip":"10m"`:                       none,
	} {
		c, err := Parse(fmt.Appendf(nil, `{"cniVersion":"1.0.0","name":"net","ipam":{"type":"stayput"},
			"runtimeConfig":{%q:{%s}}}`, AnnotationsCapability, annotation))
		if err != nil {
			t.Fatal(err)
		}
		if p, err := c.Pools(); err != nil || p != want {
			t.Errorf("%s: %+v, %v; want %+v", annotation, p, err, want)
		}
	}
}
