package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// askTimeout bounds a question to one API server.
const askTimeout = 10 * time.Second

// apiServers are all API servers of the cluster: those behind the Service kubernetes. While a control plane is being
// upgraded they are of two versions, and any of them answers what is asked of that Service.
type apiServers struct {
	reader client.Reader // from any of them
	config *rest.Config
}

// havePolicies reports whether every API server of the cluster serves MutatingAdmissionPolicies as v1.
func (s apiServers) havePolicies(ctx context.Context) (bool, error) {
	var of discoveryv1.EndpointSlice
	service := types.NamespacedName{Namespace: metav1.NamespaceDefault, Name: "kubernetes"}
	if err := s.reader.Get(ctx, service, &of); err != nil {
		return false, fmt.Errorf("reading the API servers: %w", err)
	}
	n := 0
	for _, p := range of.Ports {
		if p.Port == nil {
			continue
		}
		for _, e := range of.Endpoints {
			for _, a := range e.Addresses {
				n++
				addr := net.JoinHostPort(a, strconv.Itoa(int(*p.Port)))
				if has, err := s.hasPolicies(ctx, addr); err != nil || !has {
					return false, err
				}
			}
		}
	}
	if n == 0 {
		return false, fmt.Errorf("EndpointSlice %s has no API server", service)
	}
	return true, nil
}

// hasPolicies asks one API server, by its address, whether it serves policies. All else, such as its certificate and
// the client's credentials, is as for the API server that config is for.
func (s apiServers) hasPolicies(ctx context.Context, addr string) (bool, error) {
	list, err := s.ask(ctx, addr)
	if err != nil {
		return false, fmt.Errorf("discovering the policies of the API server at %s: %w", addr, err)
	}
	return slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool {
		return r.Name == "mutatingadmissionpolicies"
	}), nil
}

func (s apiServers) ask(ctx context.Context, addr string) (*metav1.APIResourceList, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	security, err := rest.TLSConfigFor(s.config)
	if err != nil {
		return nil, err
	}
	// Not by s.config with another Dial: client-go never forgets a connection's settings.
	transport := &http.Transport{
		TLSClientConfig: security, DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, addr)
		},
	}
	as, err := rest.HTTPWrappersForConfig(s.config, transport)
	if err != nil {
		return nil, err
	}
	base, _, err := rest.DefaultServerUrlFor(s.config)
	if err != nil {
		return nil, err
	}
	url := base.JoinPath("apis", admissionregistrationv1.GroupName, "v1").String()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	is, err := (&http.Client{Transport: as}).Do(req)
	if err != nil {
		return nil, err
	}
	defer is.Body.Close()
	if is.StatusCode != http.StatusOK {
		return nil, errors.New(is.Status)
	}
	var list metav1.APIResourceList
	if err := json.NewDecoder(is.Body).Decode(&list); err != nil {
		return nil, err
	}
	return &list, nil
}
