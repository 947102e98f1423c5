package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/stayput/stayput/pkg/ledger"
	"github.com/stayput/stayput/pkg/node/cniconf"
)

// introduceTimeout is far more than a command takes that finds nothing to do.
const introduceTimeout = 10 * time.Second

// introduce has the plugin carry out a command in a network that it was never asked for: the DEL of an attachment that
// never was. Ranges and limits are the plugin's to read, and it describes the network to the agent with any command.
// Without that the addresses of pods that were there before stayput would be promised only once the first pod comes
// or goes, and the cluster would know of their homes too late.
func (a *Agent) introduce(ctx context.Context, conf []byte) error {
	stdin, err := ipamOf(conf)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, introduceTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(a.o.CNIBinDir, cniconf.PluginName))
	cmd.Env = []string{"CNI_COMMAND=DEL", "CNI_CONTAINERID=stayput-agent", "CNI_IFNAME=" + ledger.PodInterface, "CNI_PATH=" + a.o.CNIBinDir}
	cmd.Stdin = bytes.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it is not installed yet
	}
	if err != nil {
		return fmt.Errorf("%w: %.500s", err, out)
	}
	return nil
}

// ipamOf is what the IPAM plugin is given of a configuration or a list of them: the whole of the plugin whose it is.
func ipamOf(conf []byte) ([]byte, error) {
	var list map[string]json.RawMessage
	if err := json.Unmarshal(conf, &list); err != nil {
		return nil, err
	}
	var plugins []map[string]json.RawMessage
	if raw, ok := list["plugins"]; !ok {
		plugins = append(plugins, list)
	} else if err := json.Unmarshal(raw, &plugins); err != nil {
		return nil, err
	}
	for _, p := range plugins {
		var ipam struct{ Type string }
		if json.Unmarshal(p["ipam"], &ipam) != nil || ipam.Type != cniconf.PluginName {
			continue
		}
		for _, key := range []string{"name", "cniVersion"} {
			if value, ok := list[key]; ok {
				p[key] = value
			}
		}
		return json.Marshal(p)
	}
	return nil, errors.New("no plugin has stayput as its IPAM")
}
