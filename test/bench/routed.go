package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/stayput/stayput/pkg/grants"
	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/link"
	"github.com/stayput/stayput/pkg/netconf"
	"github.com/stayput/stayput/pkg/spool"
	"github.com/stayput/stayput/test/bench/internal/table"
	"github.com/stayput/stayput/test/lab"
)

// bridged is a network of the plugin bridge in a network namespace that stands for a node.
type bridged struct {
	node  *os.File
	bin   string // with the main plugin and the IPAM plugin
	state string // of the IPAM plugin
	net   network
}

// add times a whole ADD of the main plugin for a new pod, and then ends it.
func (b *bridged) add() (took time.Duration, err error) {
	netns, done, err := newNetNS()
	if err != nil {
		return 0, err
	}
	defer done()
	id, w := newID(), b.net
	w.netns = netns
	call := func(verb string) (took time.Duration, err error) {
		env := append([]string{"CNI_PATH=" + b.bin}, w.env(verb, id, "pod-"+id[:12])...) // the first one counts
		err = link.In(b.node, func() error {
			took, err = timed([]string{filepath.Join(b.bin, "bridge")}, env, w.conf)
			return err
		})
		return took, err
	}
	if took, err = call("ADD"); err != nil {
		return 0, err
	}
	if _, err = call("DEL"); err != nil {
		return 0, err
	}
	events, err := filepath.Glob(filepath.Join(spool.Dir(b.state).Events(), "*"))
	for _, path := range events { // as the agent takes them
		err = errors.Join(err, os.Remove(path))
	}
	return took, err
}

// newBridged returns a network of its own whose pods get a routed address, or an ordinary one if there is none.
func (b *bench) newBridged(node *os.File, bin, routed string) (*bridged, error) {
	dir, err := os.MkdirTemp(b.dir, "routed-")
	if err != nil {
		return nil, err
	}
	annotations := map[string]string{"team": "a"}
	if routed != "" {
		annotations[netconf.AnnotationAddresses] = fmt.Sprintf(
			`[{"interface":"eth0","pool":"blue","mode":"Routed","address":"%s/32"}]`, routed)
	}
	ipam := lab.RangeIPAM("stayput", "10.244.1.0/24")
	state := filepath.Join(dir, "state")
	ipam["dataDir"], ipam["stateDir"] = filepath.Join(dir, "data"), state
	files := ledger.Options{StateDir: state}.Grants()
	if err := errors.Join(os.Mkdir(state, 0o755), spool.Dir(state).MakeLatencies(),
		files.PutServed(grants.Served{More: true})); err != nil {
		return nil, err
	}
	if routed != "" {
		pending, err := files.Begin(podUID, annotations[netconf.AnnotationAddresses])
		if err == nil {
			err = pending.Finish()
		}
		if err != nil {
			return nil, err
		}
	}
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.0.0", "name": networkName, "type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
		"runtimeConfig": map[string]any{lab.AnnotationsCapability: annotations}, "ipam": ipam,
	})
	return &bridged{node: node, bin: bin, state: state, net: network{plugin: "bridge", dir: dir, conf: conf}}, err
}

// measureRouted compares whole ADDs of the plugin bridge, on one bridge.
func measureRouted(ctx context.Context, b *bench) ([]table.Row, error) {
	path, done, err := newNetNS()
	if err != nil {
		return nil, err
	}
	defer done()
	node, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer node.Close()
	bin := filepath.Dir(b.product.Plugin)
	if _, err := installed(filepath.Join(b.bin.CNI, "bridge"), bin); err != nil {
		return nil, err
	}
	var nets []*bridged
	for _, routed := range []string{"10.50.0.5", ""} {
		w, err := b.newBridged(node, bin, routed)
		if err != nil {
			return nil, err
		}
		for range 3 { // the bridge, and what is made once per boot
			if _, err := w.add(); err != nil {
				return nil, err
			}
		}
		nets = append(nets, w)
	}
	times, err := turns(ctx, b.times(200), nets[0].add, nets[1].add)
	if err != nil {
		return nil, err
	}
	return []table.Row{{
		What: "ADD of a routed address, all of bridge", Against: "an ordinary address", Goal: table.AtMost(1.05),
		Figure: compared(times[0], times[1]),
		Detail: ms(median(times[0])) + " / " + ms(median(times[1])),
	}}, nil
}
