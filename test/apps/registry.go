package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// registry stands in for registries such as Nacos, which Debian does not have. Its members are told each other's
// addresses when they start, and its clients look the members up once, when they start. A name is registered once a
// majority of the members has it. A member is this program itself: see serveRegistry.
var registry = app{
	name: "registry", manifest: "registry.yaml", members: registryMembers,
	images: func(context.Context, string) ([]lab.Image, error) {
		program, err := os.Executable()
		return []lab.Image{{
			Ref: "lab.stayput.test/registry:1", Entrypoint: []string{"/apps"}, Files: map[string]string{"/apps": program},
		}}, err
	},
	form: func(ctx context.Context, s *stage, members []member) error {
		s.resolved = members
		return s.runHead(ctx, "registry.yaml")
	},
	writes: []string{"name"},
	write:  writeToRegistry,
	health: healthOfRegistry,
}

const (
	registryMembers = 3
	registryPort    = "8848"
	// asMember is the argument with which this program is a member of the registry.
	asMember = "registry"
)

// writeToRegistry registers a name with any of the members that the client knows, and looks it up there.
func writeToRegistry(ctx context.Context, s *stage, _ []member, name string) error {
	err := errors.New("no member is known")
	for _, m := range s.resolved {
		if err = askRegistry(ctx, s, m, http.MethodPut, "/names/"+name); err != nil {
			continue
		}
		if err = askRegistry(ctx, s, m, http.MethodGet, "/names/"+name); err == nil {
			return nil
		}
	}
	return err
}

// healthOfRegistry is how many members reach all.
func healthOfRegistry(ctx context.Context, s *stage, members []member) (string, bool) {
	reach := 0
	for _, m := range running(members) {
		if askRegistry(ctx, s, m, http.MethodGet, "/members") == nil {
			reach++
		}
	}
	return fmt.Sprintf("%d of %d members reach all", reach, registryMembers), reach == registryMembers
}

func askRegistry(ctx context.Context, s *stage, m member, method, path string) error {
	return askHTTP(ctx, s, m, registryPort, method, path, "")
}

// serveRegistry is a member. ADDRESSES are those of all members, itself included.
func serveRegistry() error {
	members := strings.Split(os.Getenv("ADDRESSES"), ",")
	var names sync.Map
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("PUT /copies/{name}", func(_ http.ResponseWriter, r *http.Request) {
		names.Store(r.PathValue("name"), time.Now())
	})
	mux.HandleFunc("GET /names/{name}", func(w http.ResponseWriter, r *http.Request) {
		if _, ok := names.Load(r.PathValue("name")); !ok {
			http.NotFound(w, r)
		}
	})
	mux.HandleFunc("PUT /names/{name}", func(w http.ResponseWriter, r *http.Request) {
		if askAll(r.Context(), members, http.MethodPut, "/copies/"+r.PathValue("name")) <= len(members)/2 {
			http.Error(w, "no majority", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET /members", func(w http.ResponseWriter, r *http.Request) {
		if askAll(r.Context(), members, http.MethodGet, "/") < len(members) {
			http.Error(w, "not all members answer", http.StatusServiceUnavailable)
		}
	})
	return http.ListenAndServe(":"+registryPort, mux)
}

// askAll sends a request to all members at once, and returns how many answered well.
func askAll(ctx context.Context, members []string, method, path string) (well int) {
	client := http.Client{Timeout: askFor / 2, Transport: &http.Transport{DisableKeepAlives: true}}
	answers := make(chan bool)
	for _, ip := range members {
		go func() {
			req, err := http.NewRequestWithContext(ctx, method, "http://"+net.JoinHostPort(ip, registryPort)+path, nil)
			if err != nil {
				answers <- false
				return
			}
			resp, err := client.Do(req)
			if err == nil {
				resp.Body.Close()
			}
			answers <- err == nil && resp.StatusCode == http.StatusOK
		}()
	}
	for range members {
		if <-answers {
			well++
		}
	}
	return well
}
