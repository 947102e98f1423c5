package podip

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// note keeps for /readyz how a part of the work went, and logs what is new.
func (k *Keeper) note(part string, err error) {
	k.troubled.Lock()
	defer k.troubled.Unlock()
	if err == nil {
		delete(k.troubles, part)
		return
	}
	if errors.Is(err, context.Canceled) {
		return
	}
	k.metrics.failed(part)
	if k.troubles[part] != err.Error() {
		k.log.Warn("Pools: retrying", "part", part, "err", err)
	}
	k.troubles[part] = err.Error()
}

// Trouble is why not all is done, for people, empty if it is.
func (k *Keeper) Trouble() string {
	if k == nil {
		return ""
	}
	k.troubled.Lock()
	defer k.troubled.Unlock()
	var all []string
	for _, part := range slices.Sorted(maps.Keys(k.troubles)) {
		if said := k.troubles[part]; !slices.Contains(all, said) {
			all = append(all, said)
		}
	}
	if len(all) > 3 {
		all = append(all[:3], fmt.Sprintf("and %d more", len(all)-3))
	}
	return strings.Join(all, "; ")
}
