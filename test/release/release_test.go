//go:build release

// Package release holds what `make release` has made against what it promises.
package release

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/macho"
	"debug/pe"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"

	"github.com/stayput/stayput/deploy/release/image"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

var dist = flag.String("dist", "", "absolute path of the folder that make release has filled")

const emulator = "qemu-aarch64-static"

func TestMain(m *testing.M) {
	flag.Parse()
	if err := lab.Need(context.Background(), "git", "make", "qemu-user-static"); err != nil {
		fmt.Fprintln(os.Stderr, "test/release:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// output runs a program that must succeed, and returns what it prints.
func output(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), program, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// version is that of the chart.
func version(t *testing.T) string {
	t.Helper()
	v, err := lab.ChartVersion("../../deploy/chart")
	must.Do(t, err)
	return v
}

// hashes returns the hash of each file below a folder.
func hashes(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	must.Do(t, fs.WalkDir(os.DirFS(dir), ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(filepath.Join(dir, path))
		all[path] = fmt.Sprintf("%x", sha256.Sum256(data))
		return err
	}))
	return all
}

func TestTheSameCommitMakesTheSameBytesInAnotherFolder(t *testing.T) {
	if changed := output(t, "git", "status", "--porcelain"); changed != "" {
		t.Fatalf("the release is not of a commit:\n%s", changed)
	}
	commit := strings.TrimSpace(output(t, "git", "rev-parse", "HEAD"))
	root := strings.TrimSpace(output(t, "git", "rev-parse", "--show-toplevel"))
	clone := filepath.Join(t.TempDir(), "clone")
	output(t, "git", "clone", "-q", root, clone)
	output(t, "git", "-C", clone, "checkout", "-q", "--detach", commit)
	cmd := exec.CommandContext(t.Context(), "make", "release")
	cmd.Dir = clone
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKEOVERRIDES=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make release: %v\n%s", err, out)
	}
	first, second := hashes(t, *dist), hashes(t, filepath.Join(clone, "dist"))
	delete(first, "SHA256SUMS.sigstore.json") // of an earlier make publish
	for path, hash := range first {
		if second[path] != hash {
			t.Errorf("%s is another file", path)
		}
		delete(second, path)
	}
	for path := range second {
		t.Errorf("%s was not made before", path)
	}
}

// programs are those of the image and kubectl-stayput.
var programs = append(slices.Clone(image.Programs), "kubectl-stayput")

func TestProgramsAndLabelsAgreeOnTheVersion(t *testing.T) {
	want := version(t)
	for _, program := range programs {
		flag := []string{"--version"}
		if program == "kubectl-stayput" {
			flag = []string{"version", "--client"}
		}
		amd64 := output(t, filepath.Join(*dist, "bin/linux/amd64", program), flag...)
		arm64 := output(t, emulator, append([]string{filepath.Join(*dist, "bin/linux/arm64", program)}, flag...)...)
		if !slices.Contains(strings.Fields(amd64), want) || arm64 != amd64 {
			t.Errorf("%s is of version %q, on arm64 %q", program, amd64, arm64)
		}
	}
	for arch, img := range images(t) {
		config, err := img.ConfigFile()
		must.Do(t, err)
		if got := config.Config.Labels["org.opencontainers.image.version"]; got != want || config.Architecture != arch {
			t.Errorf("the image for %s is of %s and for %s", arch, got, config.Architecture)
		}
	}
	notes, err := os.ReadFile(filepath.Join(*dist, "stayput.yaml"))
	must.Do(t, err)
	if !bytes.Contains(notes, []byte("\n  version: "+want+"\n")) {
		t.Error("krew's manifest has another version")
	}
}

func TestAgentAndControllerStartOnArm64(t *testing.T) {
	for _, program := range []string{"stayput-agent", "stayput-controller"} {
		path := filepath.Join(*dist, "bin/linux/arm64", program)
		if help := output(t, emulator, path, "--help"); !strings.Contains(help, "--kubeconfig") {
			t.Errorf("%s --help: %s", program, help)
		}
	}
}

// images are those of the layout, by architecture.
func images(t *testing.T) map[string]v1.Image {
	t.Helper()
	of, err := layout.ImageIndexFromPath(filepath.Join(*dist, "image"))
	must.Do(t, err)
	top, err := of.IndexManifest()
	must.Do(t, err)
	digest, err := os.ReadFile(filepath.Join(*dist, "digest"))
	must.Do(t, err)
	if len(top.Manifests) != 1 || top.Manifests[0].Digest.String()+"\n" != string(digest) {
		t.Fatalf("the layout has %+v, and not %s", top.Manifests, digest)
	}
	index, err := of.ImageIndex(top.Manifests[0].Digest)
	must.Do(t, err)
	must.Do(t, validate.Index(index))
	manifest, err := index.IndexManifest()
	must.Do(t, err)
	all := map[string]v1.Image{}
	for _, m := range manifest.Manifests {
		all[m.Platform.Architecture], err = index.Image(m.Digest)
		must.Do(t, err)
	}
	if len(all) != 2 {
		t.Fatalf("the index has images for %d architectures", len(all))
	}
	return all
}

func TestTheImageHasTheProgramsOfItsArchitectureAlone(t *testing.T) {
	for arch, img := range images(t) {
		content := mutate.Extract(img)
		defer content.Close()
		cmd := exec.CommandContext(t.Context(), "tar", "-x", "-C", t.TempDir())
		cmd.Stdin = content
		must.Do(t, cmd.Run())
		got, want := hashes(t, cmd.Args[3]), hashes(t, filepath.Join(*dist, "bin/linux", arch))
		delete(want, "kubectl-stayput")
		if len(got) != 3 || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("the image for %s has %v, and not %v", arch, got, want)
		}
	}
}

func TestManifestsAndChartNameTheImageByItsDigest(t *testing.T) {
	digest, err := os.ReadFile(filepath.Join(*dist, "digest"))
	must.Do(t, err)
	want := image.Repository + "@" + strings.TrimSpace(string(digest))
	helm, err := lab.BuildHelm(t.Context())
	must.Do(t, err)
	rendered := output(t, helm, "template", "stayput", filepath.Join(*dist, "stayput-"+version(t)[1:]+".tgz"))
	install, err := os.ReadFile(filepath.Join(*dist, "install.yaml"))
	must.Do(t, err)
	for name, text := range map[string]string{"the chart": rendered, "install.yaml": string(install)} {
		found := regexp.MustCompile(`image: *"?([^"\n]+)`).FindAllStringSubmatch(text, -1)
		if len(found) < 2 {
			t.Errorf("%s has the images %q", name, found)
		}
		for _, image := range found {
			if image[1] != want {
				t.Errorf("%s has the image %s, and not %s", name, image[1], want)
			}
		}
	}
}

func TestChecksumsAreOfAllFilesToDownload(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sha256sum", "--check", "--strict", "SHA256SUMS")
	cmd.Dir = *dist
	out, err := cmd.CombinedOutput()
	must.Do(t, err)
	for _, name := range []string{"install.yaml", "stayput.yaml", "kubectl-stayput_" + version(t) + "_windows_arm64.zip"} {
		if !bytes.Contains(out, []byte(name+": OK\n")) {
			t.Errorf("no checksum of %s", name)
		}
	}
}

// krew installs the plugin for a platform, and returns the path of the program.
func krew(t *testing.T, system, arch string) string {
	t.Helper()
	archive := fmt.Sprintf("kubectl-stayput_%s_%s_%s.tar.gz", version(t), system, arch)
	if system == "windows" {
		archive = strings.Replace(archive, ".tar.gz", ".zip", 1)
	}
	root := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "-C", "../lab/build/krew", "tool", "krew", "install",
		"--manifest="+filepath.Join(*dist, "stayput.yaml"), "--archive="+filepath.Join(*dist, archive))
	cmd.Env = append(os.Environ(), "GOFLAGS=-trimpath -buildvcs=false", "KREW_ROOT="+root, "KREW_OS="+system,
		"KREW_ARCH="+arch, "KREW_NO_UPGRADE_CHECK=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("krew install for %s/%s: %v\n%s", system, arch, err, out)
	}
	found, err := filepath.Glob(filepath.Join(root, "store", "stayput", version(t), "kubectl-stayput*"))
	must.Do(t, err)
	if len(found) != 1 {
		t.Fatalf("krew has installed %q", found)
	}
	return found[0]
}

func TestKrewInstallsWhatRuns(t *testing.T) {
	client := "Client Version: " + version(t) + "\n"
	if out := output(t, krew(t, "linux", "amd64"), "version", "--client"); out != client {
		t.Errorf("on amd64: %q", out)
	}
	if out := output(t, emulator, krew(t, "linux", "arm64"), "version", "--client"); out != client {
		t.Errorf("on arm64: %q", out)
	}
	// Here these can only be looked at.
	for arch, cpu := range map[string]macho.Cpu{"amd64": macho.CpuAmd64, "arm64": macho.CpuArm64} {
		f, err := macho.Open(krew(t, "darwin", arch))
		must.Do(t, err)
		if f.Type != macho.TypeExec || f.Cpu != cpu {
			t.Errorf("for darwin/%s it is a %v for %v", arch, f.Type, f.Cpu)
		}
	}
	for arch, machine := range map[string]uint16{"amd64": pe.IMAGE_FILE_MACHINE_AMD64, "arm64": pe.IMAGE_FILE_MACHINE_ARM64} {
		f, err := pe.Open(krew(t, "windows", arch))
		must.Do(t, err)
		if f.Machine != machine {
			t.Errorf("for windows/%s it is for machine %x", arch, f.Machine)
		}
	}
}

// part is a component of a bill of materials.
type part struct {
	Name, Version string
	Components    []part
}

func TestBillsOfMaterialsHaveTheModulesOfTheProgram(t *testing.T) {
	read := func(name string) part { // whose own version is a number, that of the bill
		var of struct{ Components []part }
		data, err := os.ReadFile(filepath.Join(*dist, name))
		must.Do(t, err)
		must.Do(t, json.Unmarshal(data, &of))
		return part{Components: of.Components}
	}
	has := func(of part, module string) bool {
		return slices.ContainsFunc(of.Components, func(p part) bool { return p.Name == module && p.Version != "" })
	}
	for _, arch := range []string{"amd64", "arm64"} {
		of := read("image_" + version(t) + "_linux_" + arch + ".cdx.json")
		if len(of.Components) != len(image.Programs) {
			t.Fatalf("the image for %s consists of %+v", arch, of.Components)
		}
		for i, program := range of.Components {
			if program.Name != image.Programs[i] || !has(program, "golang.org/x/sys") {
				t.Errorf("the image for %s has %s, of %+v", arch, program.Name, program.Components)
			}
		}
		if plugin := of.Components[0]; has(plugin, "k8s.io/client-go") || !has(of.Components[1], "k8s.io/client-go") {
			t.Errorf("plugin and agent are of %+v", of.Components[:2])
		}
	}
	for _, platform := range []string{"linux_amd64", "darwin_arm64", "windows_amd64"} {
		if !has(read("kubectl-stayput_"+version(t)+"_"+platform+".cdx.json"), "k8s.io/cli-runtime") {
			t.Errorf("the bill of kubectl-stayput for %s lacks k8s.io/cli-runtime", platform)
		}
	}
}
