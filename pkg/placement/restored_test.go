package placement

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// versionReader answers each list with the next of its versions, the last one again and again; "" is an error.
type versionReader struct {
	client.Reader
	versions []string
}

func (r *versionReader) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	version := r.versions[0]
	if len(r.versions) > 1 {
		r.versions = r.versions[1:]
	}
	list.SetResourceVersion(version)
	if version == "" {
		return errors.New("the API server is away")
	}
	return nil
}

func TestTheControllerEndsOnceVersionsGoBackwards(t *testing.T) {
	for name, c := range map[string]struct {
		versions []string
		restored bool
	}{
		"forwards":                         {versions: []string{"9", "9", "10", "100"}},
		"backwards":                        {versions: []string{"10", "9", "11"}, restored: true},
		"backwards after an outage":        {versions: []string{"10", "", "", "9", "11"}, restored: true},
		"away at the start":                {versions: []string{"", "9", "10"}},
		"a version that is not a number":   {versions: []string{"10", "x", "11"}},
		"bumped by the restore":            {versions: []string{"10", "", "1000000010"}},
		"backwards by more than one digit": {versions: []string{"100", "99"}, restored: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 10*restoreInterval)
				defer cancel()
				err := restoreWatch{&versionReader{versions: c.versions}, logr.Discard()}.Start(ctx)
				if errors.Is(err, ErrRestored) != c.restored || err != nil && !c.restored {
					t.Errorf("ended with %v, restored: %v", err, c.restored)
				}
			})
		})
	}
}
