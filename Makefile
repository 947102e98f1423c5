# The targets install what they need with apt-get if run as root, and otherwise name it. Components built for the tests
# are cached by pinned version in $STAYPUT_CACHE, by default ~/.cache/stayput.

GO      ?= go
# The release to build. Without a tag, or outside of git, the programs report their commit.
VERSION ?= $(shell git describe --tags --dirty --match 'v[0-9]*' 2>/dev/null)
LDFLAGS := -s -w $(if $(VERSION),-X github.com/stayput/stayput/cmd/internal/release.version=$(VERSION))
# Without grpcnotrace golang.org/x/net/trace keeps the linker from dropping unused code.
BUILD   := $(GO) build -trimpath -tags grpcnotrace -ldflags "$(LDFLAGS)"

# No C is needed, and Go's own linker is faster.
export CGO_ENABLED := 0

.PHONY: all build image release publish github-release release-check \
	manifests test lab vet demo chaos chaos-routed chaos-calico flannel long conformance compat apps calico calico-ipam crio multus \
	cert-manager mesh openkruise floods bench bench-cluster fuzz fuzz-model clean

all: build

# The lab builds with this target, so that the tested programs are the released ones.
BIN      ?= bin
PROGRAMS ?= ./cmd/...
build: ## the static binaries, in bin/ (BIN)
	$(BUILD) -o $(BIN)/ $(PROGRAMS)
	@if [ -e $(BIN)/kubectl-stayput ]; then ln -sf kubectl-stayput $(BIN)/kubectl_complete-stayput; fi

# The release in the manifests' image: the chart's.
RELEASE := $(shell sed -n 's/^appVersion: *//p' deploy/chart/Chart.yaml)
IMAGE   ?= ghcr.io/stayput/stayput:$(RELEASE)
image: build ## bin/image.tar with the manifests' image, or IMAGE, for docker load, podman load or ctr images import
	$(GO) run ./deploy/release -version $(or $(VERSION),$(RELEASE)) -archive $(IMAGE) $(BIN)

# A release is made from a commit, whose time all files have, and by this version of Go: others make other bytes.
DIST ?= dist
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
# kubectl-stayput runs on all of them, the other programs on Linux.
PLATFORMS := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64 windows/arm64
# With a TAG it must be the chart's version, and CHANGELOG.md must have its section.
TAG ?=
release: ## dist/ (DIST): all that a release publishes; the same commit makes the same bytes
	@test "$(or $(TAG),$(RELEASE))" = $(RELEASE) || { echo "the tag is $(TAG), the chart's appVersion $(RELEASE)"; exit 1; }
	rm -rf $(DIST)
	@for p in $(PLATFORMS); do \
		case $$p in linux/*) programs=./cmd/... ;; *) programs=./cmd/kubectl-stayput ;; esac; \
		GOOS=$${p%/*} GOARCH=$${p#*/} GOFLAGS=-buildvcs=true $(MAKE) --no-print-directory build \
			BIN=$(DIST)/bin/$$p PROGRAMS="$$programs" VERSION=$(RELEASE) || exit 1; \
	done
	$(GO) run ./deploy/release $(if $(TAG),-tagged) -version $(RELEASE) -epoch $(SOURCE_DATE_EPOCH) $(DIST)

# The tag is for people; what refers to the image does so by digest. Without a key cosign asks the CI who it is.
REGISTRY     ?= ghcr.io/stayput
COSIGN_FLAGS ?= --yes
HELM_FLAGS   ?=
PINNED       := GOFLAGS='-trimpath -buildvcs=false' $(GO) -C test/lab/build
DIGEST        = $(REGISTRY)/stayput@$(shell cat $(DIST)/digest)
publish: ## pushes the image and the chart in dist/ to REGISTRY, and signs them, the bills of materials and SHA256SUMS
	$(PINNED)/cosign tool crane push $(abspath $(DIST))/image $(REGISTRY)/stayput:$(RELEASE)
	$(PINNED)/cosign tool cosign sign $(COSIGN_FLAGS) $(DIGEST)
	@for arch in amd64 arm64; do \
		of=$$($(PINNED)/cosign tool crane digest --full-ref --platform linux/$$arch $(DIGEST)) || exit 1; \
		$(PINNED)/cosign tool cosign attest $(COSIGN_FLAGS) --type cyclonedx \
			--predicate $(abspath $(DIST))/image_$(RELEASE)_linux_$$arch.cdx.json $$of || exit 1; \
	done
	$(PINNED)/helm tool helm push $(HELM_FLAGS) $(abspath $(DIST))/stayput-$(RELEASE:v%=%).tgz oci://$(REGISTRY)/charts
	$(PINNED)/cosign tool cosign sign $(COSIGN_FLAGS) \
		$(REGISTRY)/charts/stayput@$$($(PINNED)/cosign tool crane digest $(REGISTRY)/charts/stayput:$(RELEASE:v%=%))
	$(PINNED)/cosign tool cosign sign-blob $(COSIGN_FLAGS) --bundle $(abspath $(DIST))/SHA256SUMS.sigstore.json \
		$(abspath $(DIST))/SHA256SUMS

github-release: ## the release of TAG on GitHub, with the files in dist/, by gh
	cd $(DIST) && gh release create $(TAG) --verify-tag --title $(TAG) --notes-file notes.md \
		SHA256SUMS SHA256SUMS.sigstore.json $$(sed 's/.*  //' SHA256SUMS)

# Left out in the emulator is the story of a probe by IPv6: it lacks the option of a packet socket that hears a group.
release-check: release ## dist/ made twice, and tried: registry, signatures, containerd, Helm, krew, arm64; 15 min, and 10 more the first time
	$(GO) run ./test/lab/cmd/labbuild release
	$(PINNED)/cosign tool cosign version
	$(GO) test -count=1 -v -timeout 30m -tags release ./test/release -dist $(abspath $(DIST))
	$(GO) test -count=1 -timeout 60m ./test/script -plugin $(abspath $(DIST))/bin/linux/arm64/stayput \
		-emulator qemu-aarch64-static -skip TestStories/another-machine-has
	$(GO) build -o bin/compat ./test/compat
	bin/compat -k8s=1.37 -release=$(DIST)

manifests: ## deploy/*.yaml from the chart; a test checks that they are current
	$(GO) generate ./pkg/api/...
	$(GO) run ./test/chart/write deploy

lab: ## the pinned components for the tests: containerd, Kubernetes, Helm…; 8 min the first time
	$(GO) run ./test/lab/cmd/labbuild

vet: ## gofmt, go vet and the linters of .golangci.yml
	@test -z "$$(gofmt -l cmd deploy pkg plugin test)" || { echo "not formatted by gofmt:"; gofmt -l cmd deploy pkg plugin test; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags conformance ./test/conformance
	$(GO) vet -tags release ./test/release
	$(GO) vet -tags floods ./test/flood
	$(GO) vet -tags calico ./test/node ./test/cluster
	$(GO) vet -tags mesh ./test/node
	$(GO) vet -tags flannel,long,multus,certmanager,openkruise ./test/cluster
	$(GO) run ./test/lab/cmd/lint run

# -count=1: Go's test cache does not notice changes of the binaries under test.
# test/cluster comes first: it takes as long as all others together, which run beside it.
# The names of what failed come last: a failed cluster test prints thousands of lines.
test: SHELL := bash
test: .SHELLFLAGS := -o pipefail -c
test: vet lab ## all tests but the long ones: unit, crash, stories, real containerd and Kubernetes; half an hour
	@mkdir -p bin
	$(GO) test -count=1 -timeout 80m ./test/cluster ./... | tee bin/test.log || \
		{ echo "Failed:"; grep -E '^ *--- FAIL|^FAIL|^panic' bin/test.log; exit 1; }

# Builds the components it needs. Not with go run, which would not forward the signal that ends make.
demo: ## stateful pods on Kubernetes without and with stayput; KEEP=1 leaves the cluster up until Ctrl-C, SVG=FILE records
	$(GO) build -o bin/demo ./test/demo
	bin/demo $(if $(KEEP),--keep) $(if $(SVG),--svg=$(SVG))

# Built first for the same reason.
FOR  ?= 30m
SEED ?= 0
chaos: ## random faults on a real Kubernetes while every promise is watched, for FOR=30m; SEED=N repeats a run
	$(GO) build -o bin/chaos ./test/chaos
	bin/chaos -for=$(FOR) -seed=$(SEED)

chaos-routed: ## the same with pods of routed pools, beside flanneld and kube-proxy, that clients on every node ask
	$(GO) build -o bin/chaos ./test/chaos
	bin/chaos -routed -for=$(FOR) -seed=$(SEED)

chaos-calico: ## the same with pods of pools in Calico's own IPAM, beside Felix and Calico's controllers
	$(GO) run ./test/lab/cmd/labbuild calico-ipam
	$(GO) build -o bin/chaos ./test/chaos
	bin/chaos -calico -for=$(FOR) -seed=$(SEED)

flannel: ## routed pools beside flanneld and kube-proxy; 12 min, and 4 more the first time
	$(GO) run ./test/lab/cmd/labbuild flannel
	$(GO) test -count=1 -v -timeout 90m -tags flannel \
		-run 'SourcesOfRouted|OutliveFlanneld|SixtyPods|OutliveAllNodes' ./test/cluster

conformance: ## upstream tests of StatefulSets, pod networking and sandboxes: 10 min, 5 more the first time
	$(GO) run ./test/lab/cmd/labbuild conformance
	$(GO) test -count=1 -v -timeout 90m -tags conformance ./test/conformance

# Built first for the same reason.
compat: ## one scenario on other versions and runtimes: all cells, K8S=1.33, RUNTIME=crio, NRI=off, GATE=v1beta1
	$(GO) build -o bin/compat ./test/compat
	bin/compat $(if $(K8S),-k8s=$(K8S)) $(if $(RUNTIME),-runtime=$(RUNTIME)) $(if $(NRI),-nri=$(NRI)) \
		$(if $(GATE),-gate=$(GATE))

apps: ## Redis Cluster, etcd, ZooKeeper, a registry without and with stayput: deleted, rolled, drained, power losses; APP=etcd
	$(GO) build -o bin/apps ./test/apps
	bin/apps $(if $(APP),-app=$(APP))

calico: ## pods of Calico's CNI plugin with host-local, and canal with Felix and flanneld; RUNTIME=crio: on that, no canal
	$(GO) run ./test/lab/cmd/labbuild calico
	$(GO) test -count=1 -timeout 30m -tags calico -run Calico ./test/node $(if $(RUNTIME),-runtime $(RUNTIME))
	$(if $(RUNTIME),,$(GO) test -count=1 -v -timeout 30m -tags calico -run Canal ./test/cluster)

calico-ipam: ## clusters of Calico alone, with its own IPAM: 50 min, and 10 more the first time
	$(GO) run ./test/lab/cmd/labbuild calico-ipam
	$(GO) test -count=1 -v -timeout 120m -tags calico -run CalicoIPAM ./test/cluster

long: ## cluster tests that make test leaves out: upgrades, a thousand pods, policies after the webhook, Kruise's and Spiderpool's words
	$(GO) run ./test/lab/cmd/labbuild
	$(GO) test -count=1 -v -timeout 60m -tags long ./test/cluster \
		-run 'Upgrade|ManyPodsAtOnce|PodWithoutRoom|PoliciesTakeTheWebhook|PoliciesAndBack|OpenKruisesDefinition|SpiderpoolsStatefulSet|SetsVersionsBack'

multus: ## retained addresses and those of pools behind multus, thin and thick, on a cluster; 6 min
	$(GO) run ./test/lab/cmd/labbuild
	$(GO) test -count=1 -v -timeout 30m -tags multus -run 'PodsBehind|PodsThrough' ./test/cluster

cert-manager: ## the webhook that gates pods with a certificate of cert-manager; 4 min, and 4 more the first time
	$(GO) run ./test/lab/cmd/labbuild cert-manager
	$(GO) test -count=1 -v -timeout 30m -tags certmanager -run CertManager ./test/cluster

mesh: ## Istio's and Linkerd's own installers, coming and going beside the agent on containerd; 1 min, and 15 more the first time
	$(GO) run ./test/lab/cmd/labbuild mesh
	$(GO) test -count=1 -v -timeout 30m -tags mesh -run Mesh ./test/node

openkruise: ## pods of OpenKruise's workloads beside its running manager; 2 min, and 10 more the first time
	$(GO) run ./test/lab/cmd/labbuild openkruise
	$(GO) test -count=1 -v -timeout 30m -tags openkruise -run TestStayputBesideARunningOpenKruise ./test/cluster

floods: ## what any client or author can send controllers, within the chart's limit of memory; 10 min
	$(GO) run ./test/lab/cmd/labbuild
	$(GO) test -count=1 -v -timeout 30m -tags floods ./test/flood

crio: ## the tests of a node on CRI-O, which the first run builds
	$(GO) test -count=1 -v -timeout 60m ./test/node -runtime crio

bench: ## ratios against host-local, measured in one run
	$(GO) run ./test/bench

bench-cluster: ## the same on clusters: latency, throughput, API writes, scale, pools; more than an hour
	$(GO) build -o bin/bench-cluster ./test/bench/cluster
	bin/bench-cluster $(BENCHFLAGS)

FUZZTIME ?= 30s
# The seeds of the histories, from BASE on; 0 begins at the clock. One process uses one core: run slices beside each other.
BASE      ?= 0
HISTORIES ?= 20000
fuzz: fuzz-model ## new random histories of the model test (BASE, HISTORIES), and each fuzz target for FUZZTIME
	@for pkg in ./pkg/retention ./pkg/ledger ./plugin/ipam; do \
		for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz'); do \
			$(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$pkg || exit 1; \
		done; \
	done

fuzz-model: ## the random histories alone
	$(GO) test -count=1 -v -timeout 0 -run RandomHistories ./pkg/ledger -model.base=$(BASE) -model.histories=$(HISTORIES)

clean:
	rm -rf bin $(DIST)
