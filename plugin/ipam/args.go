package ipam

import (
	"fmt"
	"strings"

	"github.com/stayput/stayput/pkg/ledger"
)

// podArgs are the words of CNI_ARGS that the plugin knows.
type podArgs struct {
	pod ledger.Pod
	ip  string
	// noPod says why pod is empty though there are words for it: runtimes other than kubelet's call their
	// sandboxes what they like, which is an error only if something is to be kept for that name.
	noPod error
}

// parseArgs reads CNI_ARGS, "K=V;K2=V2". Unknown words are an error unless IgnoreUnknown says otherwise, as
// for every plugin (cni/pkg/types/args.go).
func parseArgs(args string) (podArgs, error) {
	var p podArgs
	if args == "" {
		return p, nil
	}
	var unknown []string
	ignore, isPod := false, false
	for pair := range strings.SplitSeq(args, ";") {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || strings.Contains(value, "=") {
			return p, fmt.Errorf("CNI_ARGS: invalid pair %.64q: expected KEY=VALUE", pair)
		}
		switch key {
		case "IgnoreUnknown":
			ignore = value == "1" || strings.EqualFold(value, "true")
		case "IP":
			p.ip = value
		case "K8S_POD_NAMESPACE":
			p.pod.Namespace, isPod = value, true
		case "K8S_POD_NAME":
			p.pod.Name, isPod = value, true
		case "K8S_POD_UID":
			p.pod.UID = value
		case "K8S_POD_INFRA_CONTAINER_ID":
		default:
			unknown = append(unknown, fmt.Sprintf("%.64q", pair))
		}
	}
	if len(unknown) > 0 && !ignore {
		return p, fmt.Errorf("CNI_ARGS: unknown args %.256s: expected IgnoreUnknown=1 with them",
			strings.Join(unknown, ", "))
	}
	if !isPod {
		p.pod = ledger.Pod{}
		return p, nil
	}
	if err := p.pod.Validate(); err != nil {
		p.pod, p.noPod = ledger.Pod{}, fmt.Errorf("CNI_ARGS: %w", err)
	}
	return p, nil
}
