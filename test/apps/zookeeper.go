package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/stayput/stayput/test/lab"
)

// zookeeper is Debian's ZooKeeper under the name of the image that users have.
var zookeeper = app{
	name: "zookeeper", manifest: "zookeeper.yaml", members: zookeeperServers,
	images: zookeeperImages,
	form:   func(ctx context.Context, s *stage, _ []member) error { return s.runHead(ctx, "zookeeper.yaml") },
	writes: []string{"session"},
	write:  writeToZooKeeper,
	health: healthOfZooKeeper,
}

const (
	zookeeperServers = 3
	zookeeperPort    = "2181"
)

// startZooKeeper is the image's zkServer.sh: Debian's own wants bash and the settings of a machine. The jar names the
// others that it needs.
const startZooKeeper = `#!/bin/sh
exec java -Xmx128m -XX:+UseSerialGC -cp /usr/share/java/zookeeper.jar:/usr/share/java/slf4j-simple.jar \
  org.apache.zookeeper.server.quorum.QuorumPeerMain "$2"
`

func zookeeperImages(ctx context.Context, dir string) ([]lab.Image, error) {
	image, err := lab.Busybox(ctx)
	if err != nil {
		return nil, err
	}
	image.Ref, image.Entrypoint = "docker.io/library/zookeeper:3.8", nil
	packages := []string{
		"openjdk-17-jre-headless", "libzookeeper-java", "libslf4j-java", "libnetty-java", "libdropwizard-metrics-java",
		"libsnappy-java",
	}
	if err := lab.Need(ctx, packages...); err != nil {
		return nil, err
	}
	folders := []string{"/usr/lib/jvm", "/etc/java-17-openjdk", "/usr/share/java"}
	if err := image.AddPackages(ctx, folders, packages...); err != nil {
		return nil, err
	}
	java, err := filepath.EvalSymlinks("/usr/bin/java")
	if err != nil {
		return nil, err
	}
	image.Links["/usr/bin/java"] = java
	lib := filepath.Join(filepath.Dir(java), "../lib")
	if err := image.AddPrograms(ctx, java, filepath.Join(lib, "server/libjvm.so"), filepath.Join(lib, "libzip.so"),
		filepath.Join(lib, "libnio.so")); err != nil {
		return nil, err
	}
	script := filepath.Join(dir, "zkServer.sh")
	image.Files["/usr/bin/zkServer.sh"] = script
	return []lab.Image{image}, os.WriteFile(script, []byte(startZooKeeper), 0o755)
}

// writeToZooKeeper opens a session at any server, and ends it. Both are transactions of the quorum.
func writeToZooKeeper(ctx context.Context, s *stage, members []member, _ string) error {
	err := errors.New("no server runs")
	for _, m := range members {
		if err = openSession(ctx, s, m); err == nil {
			return nil
		}
	}
	return err
}

func openSession(ctx context.Context, s *stage, m member) error {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	conn, err := s.dial(ctx, m, zookeeperPort)
	if err != nil {
		return err
	}
	defer conn.Close()
	var request bytes.Buffer
	err = binary.Write(&request, binary.BigEndian, struct {
		Length, Version int32
		LastSeen        int64
		Timeout         int32
		Session         int64
		PasswordLength  int32
		Password        [16]byte
		ReadOnly        bool
	}{Length: 45, Timeout: 4000, PasswordLength: 16})
	if err != nil {
		return err
	}
	if _, err := conn.Write(request.Bytes()); err != nil {
		return err
	}
	var answer struct {
		Length, Version, Timeout int32
		Session                  int64
	}
	if err := binary.Read(conn, binary.BigEndian, &answer); err != nil {
		return fmt.Errorf("%s opens no session: %w", m.name, err)
	}
	if answer.Session == 0 {
		return errors.New(m.name + " opens no session")
	}
	// length, number of the request, end of the session
	return binary.Write(conn, binary.BigEndian, [3]int32{8, 1, -11})
}

// healthOfZooKeeper is how many servers follow a leader, or are it.
func healthOfZooKeeper(ctx context.Context, s *stage, members []member) (string, bool) {
	serving := 0
	for _, m := range running(members) {
		if says, err := askZooKeeper(ctx, s, m); err == nil && strings.Contains(says, "Mode: ") {
			serving++
		}
	}
	return fmt.Sprintf("%d of %d servers with a quorum", serving, zookeeperServers), serving == zookeeperServers
}

func askZooKeeper(ctx context.Context, s *stage, m member) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	conn, err := s.dial(ctx, m, zookeeperPort)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "srvr"); err != nil {
		return "", err
	}
	says, err := io.ReadAll(conn)
	return string(says), err
}
