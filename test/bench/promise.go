package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/stayput/stayput/test/bench/internal/table"
)

// measurePromise times the ADDs that have to know how many promises there are.
func measurePromise(ctx context.Context, b *bench) ([]table.Row, error) {
	netns, done, err := newNetNS()
	if err != nil {
		return nil, err
	}
	defer done()
	// Of a full share, an ADD that asks for a promise and one that does not.
	const full = 1100
	size := 1<<(32-networkRange.Bits()) - 3 // without network, gateway and broadcast
	beyond, err := b.network(b.product.Plugin, netns, asked)
	if err != nil {
		return nil, err
	}
	beyond.ipam["promisedShare"] = (full + 0.5) / float64(size)
	beyond.ipam["promisedLimit"] = full + 1
	if beyond, err = beyond.of(asked); err != nil {
		return nil, err
	}
	plain, err := beyond.of(ordinary)
	if err != nil {
		return nil, err
	}
	n := b.times(100)
	refused, err := b.adds(ctx, n, full, 0, beyond, plain)
	if err != nil {
		return nil, err
	}
	// The ADD of a new promise, beside many and beside few.
	const many = 10_000
	crowded, err := b.network(b.product.Plugin, netns, asked)
	if err != nil {
		return nil, err
	}
	crowded.ipam["promisedLimit"] = 2 * many
	if crowded, err = crowded.of(asked); err != nil {
		return nil, err
	}
	lonely, err := b.network(b.product.Plugin, netns, asked)
	if err != nil {
		return nil, err
	}
	promised, err := b.adds(ctx, n, many, n+warm, crowded, lonely)
	if err != nil {
		return nil, err
	}
	row := func(what, against string, times [][]time.Duration) table.Row {
		return table.Row{
			What: what, Against: against, Goal: table.AtMost(1.3), Figure: compared(times[0], times[1]),
			Detail: ms(median(times[0])) + " / " + ms(median(times[1])),
		}
	}
	return []table.Row{
		row(fmt.Sprintf("ADD beyond the share, %d promised", full), "an ordinary pod's there", refused),
		row(fmt.Sprintf("ADD of a new promise, %d promised", many), "the same with few promised", promised),
	}, nil
}

// warm is the number of pods that come and go before the measurement.
const warm = 3

// adds retains addresses in the first network and times n ADDs of new pods in each of both, in turns. Together they
// must have made the first one's claims more by this many.
func (b *bench) adds(ctx context.Context, n, retained, more int, first, second *network) ([][]time.Duration, error) {
	if err := first.retain(retained); err != nil {
		return nil, err
	}
	add := func(w *network) func() (time.Duration, error) {
		return func() (time.Duration, error) {
			id := newID()
			pod := "pod-" + id[:12]
			took, err := w.call("ADD", id, pod)
			if err != nil {
				return 0, err
			}
			_, err = w.call("DEL", id, pod)
			return took, err
		}
	}
	if _, err := turns(ctx, warm, add(first), add(second)); err != nil {
		return nil, err
	}
	times, err := turns(ctx, n, add(first), add(second))
	if err != nil {
		return nil, err
	}
	claims, err := filepath.Glob(filepath.Join(first.dir, "state", networkName+"-*", "claims", "*"))
	if err != nil || len(claims) != retained+more {
		return nil, errors.Join(err, fmt.Errorf("%d promises at the end, want %d", len(claims), retained+more))
	}
	return times, errors.Join(os.RemoveAll(first.dir), os.RemoveAll(second.dir))
}
