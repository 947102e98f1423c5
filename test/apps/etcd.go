package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/stayput/stayput/test/lab"
)

// etcd is the lab's etcd under the name of the image that users have.
var etcd = app{
	name: "etcd", manifest: "etcd.yaml", members: etcdMembers,
	images: func(ctx context.Context, _ string) ([]lab.Image, error) {
		image, err := lab.EtcdImage(ctx, "quay.io/coreos/etcd:v3.7.3")
		return []lab.Image{image}, err
	},
	form:   func(ctx context.Context, s *stage, _ []member) error { return s.runHead(ctx, "etcd.yaml") },
	writes: []string{"key"},
	write:  writeToEtcd,
	health: healthOfEtcd,
}

const (
	etcdMembers = 3
	etcdPort    = "2379"
	// keyAndValue are in base64, as etcd's JSON gateway wants them.
	keyAndValue = `{"key":"a2V5","value":"dmFsdWU="}`
)

// writeToEtcd puts a key at any member.
func writeToEtcd(ctx context.Context, s *stage, members []member, _ string) error {
	err := errors.New("no member runs")
	for _, m := range members {
		if err = askHTTP(ctx, s, m, etcdPort, http.MethodPost, "/v3/kv/put", keyAndValue); err == nil {
			return nil
		}
	}
	return err
}

// healthOfEtcd is how many members have a leader and a quorum.
func healthOfEtcd(ctx context.Context, s *stage, members []member) (string, bool) {
	healthy := 0
	for _, m := range running(members) {
		if askHTTP(ctx, s, m, etcdPort, http.MethodGet, "/health", "") == nil {
			healthy++
		}
	}
	return fmt.Sprintf("%d of %d members with a quorum", healthy, etcdMembers), healthy == etcdMembers
}
