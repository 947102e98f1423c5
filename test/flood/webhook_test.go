//go:build floods

package flood

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stayput/stayput/pkg/home"
	"github.com/stayput/stayput/test/lab"
	"github.com/stayput/stayput/test/must"
)

// A client without credentials, that reaches the controllers' pods.
func TestControllersOutliveFloodsOfTheirPorts(t *testing.T) {
	c := installed(t, lab.ClusterOptions{Nodes: 1, APIServerArgs: lab.WebhooksByEndpoint},
		map[string]any{"gate": map[string]any{"mechanism": "Webhook"}})
	gatesPods(t, c)
	for name, flood := range map[string]func(context.Context, *lab.Cluster, string){
		"large reviews of small parts":  largeReviews,
		"reviews that are sent slowly":  slowReviews,
		"connections that ask for none": idleConnections,
	} {
		t.Run(name, func(t *testing.T) {
			outlived(t, c, func(controllers []corev1.Pod) {
				var all sync.WaitGroup
				for _, pod := range controllers {
					all.Go(func() { flood(testContext(t), c, pod.Status.PodIP) })
				}
				all.Wait()
			})
			gatesPods(t, c)
		})
	}
}

// largeReviews are eight at a time, of as many bytes as the webhook reads.
func largeReviews(ctx context.Context, c *lab.Cluster, ip string) {
	client := insecure(c)
	defer client.CloseIdleConnections()
	var all sync.WaitGroup
	for _, around := range [][2]string{
		{`"spec":{"containers":[{}`, `]}`}, {`"spec":{"tolerations":[{}`, `]}`},
		{`"spec":{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{}`, `]}}}}`},
		{`"metadata":{"ownerReferences":[{}`, `]}`}, {`"metadata":{"managedFields":[{}`, `]}`},
		{`"spec":{"schedulingGates":[{}`, `]}`}, {`"spec":{"volumes":[{}`, `]}`},
	} {
		body := []byte(`{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":"u","namespace":"n",` +
			`"object":{` + around[0] + strings.Repeat(",{}", 1_390_000) + around[1] + `}}}`)
		all.Go(func() {
			for i := range 20 {
				post(ctx, client, ip, []string{"/gate", "/gate-recorded"}[i%2], bytes.NewReader(body))
			}
		})
	}
	all.Wait()
}

// slowReviews are thousands at a time, each of almost what any number of them may have, or of almost the most.
func slowReviews(ctx context.Context, c *lab.Cluster, ip string) {
	const connections, requests = 400, 16
	bodies := [][]byte{bytes.Repeat([]byte(" "), 16<<10-1), bytes.Repeat([]byte(" "), 4<<20-1)}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var all sync.WaitGroup
	for i := range connections {
		client := insecure(c)
		defer client.CloseIdleConnections()
		for range requests {
			all.Go(func() {
				body, send := io.Pipe()
				defer context.AfterFunc(ctx, func() { send.Close() })()
				go func() {
					_, _ = send.Write(bodies[i%len(bodies)]) // until it is answered
				}()
				post(ctx, client, ip, "/gate", body)
				body.Close()
			})
		}
	}
	all.Wait()
}

// idleConnections are more than a port has, to each port, again and again.
func idleConnections(ctx context.Context, c *lab.Cluster, ip string) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var all sync.WaitGroup
	for _, port := range []string{"9443", "8080", "8081"} {
		for range 1000 {
			all.Go(func() {
				for ctx.Err() == nil {
					conn, err := c.Control.Dial(ctx, "tcp", net.JoinHostPort(ip, port))
					if err != nil {
						continue
					}
					end := context.AfterFunc(ctx, func() { conn.Close() })
					_, _ = io.Copy(io.Discard, conn) // until the server closes it
					end()
					conn.Close()
				}
			})
		}
	}
	all.Wait()
}

// insecure is a client in the cluster's network, by HTTP/2.
func insecure(c *lab.Cluster) *http.Client {
	return &http.Client{Transport: &http.Transport{
		ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // it is hostile
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return c.Control.Dial(ctx, network, address)
		},
	}}
}

// post sends a request. How it is answered, if it is, does not matter to a flood.
func post(ctx context.Context, client *http.Client, ip, path string, body io.Reader) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+net.JoinHostPort(ip, "9443")+path, body)
	if err != nil {
		return
	}
	answer, err := client.Do(r)
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, answer.Body)
	answer.Body.Close()
}

// gatesPods waits until the webhook gates pods.
func gatesPods(t *testing.T, c *lab.Cluster) {
	t.Helper()
	must.Do(t, lab.Until(testContext(t), "pods to be gated", func() (bool, error) {
		pod, err := c.Client().CoreV1().Pods("default").Create(testContext(t), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "would-be-", Annotations: map[string]string{"stayput.io/retain-ip": "1m"}},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: lab.WebImage}}},
		}, metav1.CreateOptions{DryRun: []string{"All"}})
		if err != nil {
			return false, err
		}
		if !home.Gated(pod) {
			return false, fmt.Errorf("its gates are %v", pod.Spec.SchedulingGates)
		}
		return true, nil
	}))
}
