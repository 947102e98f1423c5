package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stayput/stayput/test/lab"
)

// redis is Debian's redis-server under the name of the image that users have.
var redis = app{
	name: "redis", manifest: "redis-cluster.yaml", members: redisNodes,
	images: func(ctx context.Context, _ string) ([]lab.Image, error) {
		// redis-server is a link to one of its tools, in a package of its own that would start a server here.
		if err := lab.Need(ctx, "redis-tools"); err != nil {
			return nil, err
		}
		image, err := lab.ProgramImage(ctx, "docker.io/library/redis:7.0", "/usr/bin/redis-check-rdb", "/usr/bin/redis-cli")
		image.Links["/usr/bin/redis-server"] = "redis-check-rdb"
		return []lab.Image{image}, err
	},
	form:   formRedis,
	writes: []string{"b", "c", "a"}, // keys in the slots 3300, 7365 and 15495: one of each master
	write:  writeToRedis,
	health: healthOfRedis,
}

// redisPool is the same with addresses of a pool, and with volumes that are on no node.
var redisPool = app{
	name: "redis-pool", manifest: "redis-cluster-pool.yaml", anyNode: true, members: redisNodes,
	images: redis.images, form: formRedis, writes: redis.writes, write: writeToRedis, health: healthOfRedis,
}

// formRedis makes the nodes a cluster, in the order that the manifests tell: the first pod of each machine, then the
// second. The first three are the masters. redis-cli pairs the first master with the second replica, and so on, so that
// no machine has both if each has two pods.
func formRedis(ctx context.Context, s *stage, members []member) error {
	seen, order := map[string]int{}, slices.Clone(members)
	rank := map[string]int{} // of a pod on its machine
	for _, m := range members {
		seen[m.node]++
		rank[m.name] = seen[m.node]
	}
	slices.SortFunc(order, func(x, y member) int {
		return cmp.Or(cmp.Compare(rank[x.name], rank[y.name]), cmp.Compare(x.node, y.node))
	})
	args := []string{"exec", members[0].name, "--", "redis-cli", "--cluster", "create", "--cluster-yes",
		"--cluster-replicas", "1"}
	for _, m := range order {
		args = append(args, net.JoinHostPort(m.ip, redisPort))
	}
	return lab.Until(ctx, "the nodes of Redis Cluster to serve", func() (bool, error) {
		for _, m := range members {
			if _, err := askRedis(ctx, s, m, "PING"); err != nil {
				return false, err
			}
		}
		err := s.kubectl(ctx, args...)
		return err == nil, err
	})
}

const (
	redisNodes = 6
	redisPort  = "6379"
)

// askRedis sends a command and returns the reply.
func askRedis(ctx context.Context, s *stage, m member, command string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	conn, err := s.dial(ctx, m, redisPort)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, command+"\r\n"); err != nil {
		return "", err
	}
	r := bufio.NewReader(conn)
	line, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimSpace(line)
	switch {
	case strings.HasPrefix(line, "-"):
		return "", errors.New(line[1:])
	case strings.HasPrefix(line, "$"):
		size, err := strconv.Atoi(line[1:])
		if err != nil {
			return "", err
		}
		bulk := make([]byte, size)
		_, err = io.ReadFull(r, bulk)
		return string(bulk), err
	}
	return line[1:], nil
}

// writeToRedis sets a key at any node, and then at the one that it names.
func writeToRedis(ctx context.Context, s *stage, members []member, key string) error {
	err := errors.New("no node runs")
	for _, m := range members {
		for range 3 {
			if _, err = askRedis(ctx, s, m, "SET "+key+" "+time.Now().Format(time.RFC3339Nano)); err == nil {
				return nil
			}
			// MOVED 3300 10.244.1.2:6379
			var slot int
			var at string
			if _, bad := fmt.Sscanf(err.Error(), "MOVED %d %s", &slot, &at); bad != nil {
				break
			}
			if m.ip, _, err = net.SplitHostPort(at); err != nil {
				break
			}
		}
	}
	return err
}

// healthOfRedis is what each node says of the cluster, and of its links to the others.
func healthOfRedis(ctx context.Context, s *stage, members []member) (string, bool) {
	ok, meet := 0, 0
	for _, m := range running(members) {
		info, err := askRedis(ctx, s, m, "CLUSTER INFO")
		if err == nil && strings.Contains(info, "cluster_state:ok") {
			ok++
		}
		nodes, err := askRedis(ctx, s, m, "CLUSTER NODES")
		linked := 0
		for line := range strings.Lines(nodes) {
			// id address flags master ping-sent pong-recv epoch link-state slots
			f := strings.Fields(line)
			if len(f) > 7 && f[7] == "connected" && !strings.Contains(f[2], "fail") {
				linked++
			}
		}
		if err == nil && linked == redisNodes {
			meet++
		}
	}
	says := fmt.Sprintf("cluster_state:ok on %d of %d nodes, %d connected to all", ok, redisNodes, meet)
	return says, ok == redisNodes && meet == redisNodes
}
