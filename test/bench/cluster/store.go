package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// store writes objects straight into etcd, in the API server's format: creating the full size through the API server
// takes a quarter of an hour. The objects are copies of objects created by the API server, which learns about them from
// its etcd watch.
type store struct {
	http     *http.Client
	encoders map[schema.GroupVersion]runtime.Encoder
}

func (w *world) newStore() *store {
	s := &store{encoders: map[schema.GroupVersion]runtime.Encoder{}, http: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: scaleClients,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return w.Control.Dial(ctx, network, address)
		},
	}}}
	for _, version := range []schema.GroupVersion{corev1.SchemeGroupVersion, appsv1.SchemeGroupVersion} {
		s.encoders[version] = serializer.NewCodecFactory(scheme).EncoderForVersion(protobuf.NewSerializer(scheme, scheme),
			version)
	}
	return s
}

// pair is an object in etcd. JSON encodes both parts in base64, as etcd's gateway expects.
type pair struct {
	Key   []byte `json:"key"`
	Value []byte `json:"value"`
}

// pair encodes an object as the API server does: built-in types as protobuf, custom resources as JSON.
func (s *store) pair(o client.Object) (pair, error) {
	o.SetResourceVersion("")
	name := o.GetNamespace() + "/" + o.GetName()
	var prefix string
	version := corev1.SchemeGroupVersion
	switch o := o.(type) {
	case *corev1.Node:
		prefix, name = "/registry/minions/", o.Name
	case *corev1.Pod:
		prefix = "/registry/pods/"
	case *appsv1.StatefulSet:
		prefix, version = "/registry/statefulsets/", appsv1.SchemeGroupVersion
	case *stayputv1alpha1.RetainedIP:
		o.SetGroupVersionKind(stayputv1alpha1.SchemeGroupVersion.WithKind("RetainedIP"))
		data, err := json.Marshal(o)
		return pair{[]byte("/registry/stayput.io/retainedips/" + name), data}, err
	case *stayputv1alpha1.PodIP:
		o.SetGroupVersionKind(stayputv1alpha1.SchemeGroupVersion.WithKind("PodIP"))
		data, err := json.Marshal(o)
		return pair{[]byte("/registry/stayput.io/podips/" + o.Name), data}, err
	default:
		return pair{}, fmt.Errorf("%T is not supported", o)
	}
	data, err := runtime.Encode(s.encoders[version], o)
	return pair{[]byte(prefix + name), data}, err
}

// mostPuts is below etcd's limit for one transaction, 128.
const mostPuts = 100

// put stores objects, at most mostPuts, in one transaction.
func (s *store) put(ctx context.Context, objects ...client.Object) error {
	type request struct {
		Put pair `json:"requestPut"`
	}
	var transaction struct {
		Success []request `json:"success"`
	}
	for _, o := range objects {
		p, err := s.pair(o)
		if err != nil {
			return err
		}
		transaction.Success = append(transaction.Success, request{p})
	}
	body, err := json.Marshal(transaction)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:2379/v3/kv/txn", bytes.NewReader(body))
	if err != nil {
		return err
	}
	answer, err := s.http.Do(req)
	if err != nil {
		return err
	}
	said, err := io.ReadAll(answer.Body)
	if err := errors.Join(err, answer.Body.Close()); err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("etcd: %s: %s", answer.Status, said)
	}
	return nil
}
