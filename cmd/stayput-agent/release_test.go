package main

import (
	"encoding/json"
	"testing"

	"github.com/stayput/stayput/pkg/api/inspection"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/test/must"
)

func TestReleaseFreesWhatIsRetainedForANamespaceAndNothingElse(t *testing.T) {
	state, ledgers := files(t)
	retained := func() (n int) {
		for _, l := range ledgers {
			addrs, err := l.List()
			must.Do(t, err)
			bound := 0
			for _, a := range addrs {
				switch a.State {
				case ledger.StateRetained:
					n++
				case ledger.StateBound:
					bound++
				}
			}
			if bound != 1 {
				t.Errorf("%d addresses are bound", bound)
			}
		}
		return n
	}
	release := func(namespace string, flags ...string) (done []inspection.ReleaseItem) {
		out, err := execute(append([]string{"release", namespace, "--state-dir", state}, flags...)...)
		must.Do(t, err)
		var all inspection.Release
		must.Do(t, json.Unmarshal([]byte(out), &all))
		return all.Items
	}
	if items := release("other", "--act"); len(items) != 0 || retained() != 2 {
		t.Errorf("of another namespace: %+v, %d are left", items, retained())
	}
	if items := release("default"); len(items) != 2 || items[0].Done || retained() != 2 {
		t.Errorf("a plan: %+v, %d are left", items, retained())
	}
	items := release("default", "--act")
	if len(items) != 2 || !items[0].Done || items[0].Pod != "kept" || retained() != 0 {
		t.Errorf("released %+v, %d are left", items, retained())
	}
}
