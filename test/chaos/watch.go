package main

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// follow calls seen with every state of the objects of a list's kind and gone with the last one of each that is
// deleted, until ctx ends. After an outage of the API server it is up to date at once: client-go's informers would wait
// up to half a minute.
func follow[T client.Object](ctx context.Context, c client.WithWatch, kind client.ObjectList, seen, gone func(T),
	o ...client.ListOption) {
	known := map[types.UID]T{}
	for sleep(ctx, 200*time.Millisecond) {
		list, ok := kind.DeepCopyObject().(client.ObjectList)
		if !ok {
			return // never: a copy is of the same type
		}
		if err := listed(ctx, c, list, o, known, seen, gone); err != nil {
			continue
		}
		from := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: list.GetResourceVersion()}}
		w, err := c.Watch(ctx, list, append(slices.Clone(o), from)...)
		if err != nil {
			continue
		}
		for e := range w.ResultChan() {
			is, ok := e.Object.(T)
			if !ok {
				break // an error, such as a version that is too old
			}
			if e.Type == watch.Deleted {
				delete(known, is.GetUID())
				gone(is)
			} else if e.Type == watch.Added || e.Type == watch.Modified {
				known[is.GetUID()] = is
				seen(is)
			}
		}
		w.Stop()
	}
}

// listed lists the objects, and tells of what changed since.
func listed[T client.Object](ctx context.Context, c client.Client, list client.ObjectList, o []client.ListOption,
	known map[types.UID]T, seen, gone func(T)) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := c.List(ctx, list, o...); err != nil {
		return err
	}
	there := map[types.UID]T{}
	if err := meta.EachListItem(list, func(o runtime.Object) error {
		if is, ok := o.(T); ok {
			there[is.GetUID()] = is
		}
		return nil
	}); err != nil {
		return err
	}
	for uid, was := range known {
		if _, still := there[uid]; !still {
			delete(known, uid)
			gone(was)
		}
	}
	for uid, is := range there {
		known[uid] = is
		seen(is)
	}
	return nil
}
