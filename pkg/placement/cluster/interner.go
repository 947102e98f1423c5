package cluster

import "sync"

// Interner makes equal strings share their memory, as long as there are not too many. Its zero value is ready, and safe
// for concurrent use.
type Interner struct {
	mu  sync.Mutex
	all map[string]string
}

// internedMost bounds the strings kept that no object uses any more.
const internedMost = 50_000

// One returns the string as it is kept.
func (i *Interner) One(s string) string {
	i.mu.Lock()
	defer i.mu.Unlock()
	if known, ok := i.all[s]; ok {
		return known
	}
	if i.all == nil || len(i.all) >= internedMost {
		i.all = map[string]string{}
	}
	i.all[s] = s
	return s
}
