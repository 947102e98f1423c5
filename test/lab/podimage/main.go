// Podimage is the one program in the lab's images. It tells who it is to anyone who asks by HTTP: its host name on the
// first line, then the addresses of its interfaces; a header says since when it runs. As the pause image it serves on a
// port of its own, so that a pod can be reached without a container; as the web image on :80.
package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: podimage ADDRESS")
		os.Exit(2)
	}
	started := time.Now().UTC().Format(time.RFC3339Nano)
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Started", started)
		name, _ := os.Hostname()
		fmt.Fprintln(w, name)
		addrs, err := net.InterfaceAddrs()
		if err != nil {
			fmt.Fprintln(w, err)
		}
		for _, a := range addrs {
			fmt.Fprintln(w, a)
		}
	})
	// In the node's network another pod may have the port. A pause has to go on all the same.
	fmt.Fprintln(os.Stderr, http.ListenAndServe(os.Args[1], nil))
	for {
		time.Sleep(time.Hour)
	}
}
