package cli

import (
	"errors"
	"testing"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

func TestAReleasedAddressIsKeptNoLonger(t *testing.T) {
	type change = func(*stayputv1alpha1.RetainedIP)
	released := func(r *stayputv1alpha1.RetainedIP) { r.Spec.Release = stayputv1alpha1.ReleaseNow }
	another := func(r *stayputv1alpha1.RetainedIP) { r.UID = "another" }
	elsewhere := func(r *stayputv1alpha1.RetainedIP) { r.Status.IPs = []string{"10.1.0.10"} }
	for name, test := range map[string]struct {
		now  []change
		free bool
		err  error
	}{
		"it is still asked for":                        {[]change{released}, false, nil},
		"spec.release was unset":                       {nil, false, errKept},
		"its pod came back":                            {[]change{released, isBound}, false, errBound},
		"its pod came back, and the release is over":   {[]change{another, isBound}, false, errBound},
		"it was deleted and published again":           {[]change{another}, false, errKept},
		"and its release was requested again":          {[]change{another, released}, false, nil},
		"a later pod of that name has another address": {[]change{another, isBound, elsewhere}, true, nil},
		"a later pod of that name had another address": {[]change{another, elsewhere}, true, nil},
	} {
		free, err := keptOf(aRetainedIP(released)).isFreeBy(keptOf(aRetainedIP(test.now...)))
		if free != test.free || !errors.Is(err, test.err) || err != nil && test.err == nil {
			t.Errorf("%s: free %v, error %v", name, free, err)
		}
	}
}
