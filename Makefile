# Everything below installs or builds what it needs by itself: as root with apt-get, otherwise it says what to
# install. What is built for the tests is kept in $STAYPUT_CACHE, by default ~/.cache/stayput, by pinned version.

GO      ?= go
LDFLAGS := -s -w
BUILD   := CGO_ENABLED=0 $(GO) build -trimpath -ldflags "$(LDFLAGS)"

.PHONY: all build test lab vet demo bench fuzz clean

all: build

build: ## the static binaries, in bin/
	$(BUILD) -o bin/ ./cmd/...

lab: ## the pinned containerd, runc and CNI plugins that tests and demo run on
	$(GO) run ./test/lab/cmd/labbuild

vet:
	@test -z "$$(gofmt -l cmd pkg plugin test)" || { echo "not formatted by gofmt:"; gofmt -l cmd pkg plugin test; exit 1; }
	$(GO) vet ./...

# Without Go's test cache: it does not see the binaries that the tests run.
test: vet lab ## all tests: unit, crash, stories, real containerd
	$(GO) test -count=1 -timeout 30m ./...

demo: lab ## a pod loses its IP with host-local and keeps it with stayput
	$(GO) run ./test/demo

bench: lab ## ratios against host-local, measured in one run
	$(GO) run ./test/bench

FUZZTIME ?= 30s
fuzz: ## new histories of the model test, and every fuzz target for FUZZTIME
	$(GO) test -count=1 -timeout 0 -run RandomHistories ./pkg/ledger -model.base=0 -model.histories=20000
	@for pkg in ./pkg/ledger ./plugin/ipam; do \
		for f in $$($(GO) test -list '^Fuzz' $$pkg | grep '^Fuzz'); do \
			$(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$pkg || exit 1; \
		done; \
	done

clean:
	rm -rf bin
