// Package apilist reads a list of the API server one object after the other. The client library has all of a list in
// memory, more than once: a few dozen objects of the largest size that the API server stores are more than an agent
// has.
package apilist

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Read calls each for the objects of a list, one after the other, and returns the list's version. After an error they
// were not all.
func Read[T any](body io.Reader, each func(*T) error) (version string, err error) {
	list := json.NewDecoder(body)
	if err := token(list, '{'); err != nil {
		return "", err
	}
	for list.More() {
		key, err := list.Token()
		if err != nil {
			return "", err
		}
		switch key {
		case "metadata":
			var meta metav1.ListMeta
			if err := list.Decode(&meta); err != nil {
				return "", err
			}
			version = meta.ResourceVersion
		case "items":
			if err := readItems(list, each); err != nil {
				return "", err
			}
		default:
			var skipped json.RawMessage
			if err := list.Decode(&skipped); err != nil {
				return "", err
			}
		}
	}
	if err := token(list, '}'); err != nil {
		return "", err
	}
	if version == "" {
		return "", errors.New("the list has no resourceVersion")
	}
	return version, nil
}

func readItems[T any](list *json.Decoder, each func(*T) error) error {
	switch is, err := list.Token(); {
	case err != nil:
		return err
	case is == nil: // an empty list of a type of Go
		return nil
	case is != json.Delim('['):
		return fmt.Errorf("items: expected [, got %v", is)
	}
	for list.More() {
		o := new(T)
		if err := list.Decode(o); err != nil {
			return err
		}
		if err := each(o); err != nil {
			return err
		}
	}
	return token(list, ']')
}

// token reads what begins or ends an object or a list.
func token(d *json.Decoder, want json.Delim) error {
	is, err := d.Token()
	if err == nil && is != want {
		err = fmt.Errorf("expected %v, got %v", want, is)
	}
	return err
}
