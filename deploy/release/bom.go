package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/stayput/stayput/deploy/release/image"
)

// bom is the part of a bill of materials in CycloneDX that is read: what it is of, and what that consists of.
type bom struct {
	SpecVersion string `json:"specVersion"`
	Metadata    struct {
		Component map[string]any `json:"component"`
	} `json:"metadata"`
	Components []map[string]any `json:"components"`
}

// boms writes a bill of materials of each program, by what the Go linker has left in it, and of the image for each
// architecture: its programs with all that they consist of.
func (r *release) boms() error {
	for _, arch := range nodeArchs {
		var programs []any
		version := ""
		for _, program := range image.Programs {
			b, err := r.bom(program, "linux", arch)
			if err != nil {
				return err
			}
			version = b.SpecVersion
			whole := b.Metadata.Component
			for _, part := range b.Components {
				// References are unique in a document, where programs share modules.
				part["bom-ref"] = fmt.Sprint(program, ":", part["bom-ref"])
			}
			whole["name"], whole["bom-ref"], whole["components"] = program, program, b.Components
			programs = append(programs, whole)
		}
		of, err := json.MarshalIndent(map[string]any{
			"bomFormat": "CycloneDX", "specVersion": version, "version": 1,
			"metadata": map[string]any{"component": map[string]any{
				"bom-ref": "image", "type": "container", "name": image.Repository, "version": r.digest.String(),
			}},
			"components": programs,
		}, "", "  ")
		if err != nil {
			return err
		}
		if err := r.write(fmt.Sprintf("image_%s_linux_%s.cdx.json", r.version, arch), append(of, '\n')); err != nil {
			return err
		}
	}
	programs, err := filepath.Glob(filepath.Join(r.bin("*", "*"), "kubectl-stayput*"))
	if err != nil {
		return err
	}
	for _, path := range programs {
		arch := filepath.Dir(path)
		system := filepath.Base(filepath.Dir(arch))
		if _, err := r.bom(filepath.Base(path), system, filepath.Base(arch)); err != nil {
			return err
		}
	}
	return nil
}

// bom writes the bill of materials of a program, and returns it.
func (r *release) bom(program, system, arch string) (is bom, err error) {
	name := fmt.Sprintf("%s_%s_%s_%s.cdx.json", strings.TrimSuffix(program, ".exe"), r.version, system, arch)
	err = tool("sbom", "cyclonedx-gomod", "bin", "-json", "-std", "-noserial", "-notimestamp", "-version="+r.version,
		"-output="+r.absolute(name), filepath.Join(r.absolute("bin"), system, arch, program))
	if err != nil {
		return is, err
	}
	data, err := os.ReadFile(filepath.Join(r.dir, name))
	if err != nil {
		return is, err
	}
	return is, json.Unmarshal(data, &is)
}
