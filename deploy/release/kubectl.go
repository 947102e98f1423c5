package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"
)

const (
	project   = "https://github.com/stayput/stayput"
	downloads = project + "/releases/download/"
)

// krewPlatform is an entry of spec.platforms in a manifest of krew.
type krewPlatform struct {
	Selector struct {
		MatchLabels map[string]string `json:"matchLabels"`
	} `json:"selector"`
	URI    string `json:"uri"`
	SHA256 string `json:"sha256"`
	Bin    string `json:"bin"`
}

// kubectl writes an archive of kubectl-stayput for each platform, and the manifest by which krew installs them.
func (r *release) kubectl() error {
	license, err := os.ReadFile("LICENSE")
	if err != nil {
		return err
	}
	var platforms []krewPlatform
	for _, system := range []string{"linux", "darwin", "windows"} {
		for _, arch := range []string{"amd64", "arm64"} {
			program, suffix, pack := "kubectl-stayput", ".tar.gz", tarGz
			if system == "windows" {
				program, suffix, pack = "kubectl-stayput.exe", ".zip", zipped
			}
			data, err := os.ReadFile(filepath.Join(r.bin(system, arch), program))
			if err != nil {
				return err
			}
			archive, err := pack([]file{{program, 0o755, data}, {"LICENSE", 0o644, license}}, r.at)
			if err != nil {
				return err
			}
			name := fmt.Sprintf("kubectl-stayput_%s_%s_%s%s", r.version, system, arch, suffix)
			if err := r.write(name, archive); err != nil {
				return err
			}
			p := krewPlatform{
				URI: downloads + r.version + "/" + name, SHA256: fmt.Sprintf("%x", sha256.Sum256(archive)), Bin: program,
			}
			p.Selector.MatchLabels = map[string]string{"os": system, "arch": arch}
			platforms = append(platforms, p)
		}
	}
	manifest, err := yaml.Marshal(map[string]any{
		"apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
		"kind":       "Plugin",
		"metadata":   map[string]any{"name": "stayput"},
		"spec": map[string]any{
			"version":          r.version,
			"homepage":         project,
			"shortDescription": "Shows and releases the addresses and nodes that pods keep",
			"description": "Says where a pod's address is kept and for how long, why a pod is not at home, and what\n" +
				"is wrong with an installation of Stayput; releases addresses, and imports those that\n" +
				"OpenKruise's host-local or Spiderpool keeps.\n",
			"platforms": platforms,
		},
	})
	if err != nil {
		return err
	}
	return r.write("stayput.yaml", manifest) // krew wants the plugin's name
}
