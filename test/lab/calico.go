package lab

import "context"

// calicoComponent is Calico's CNI plugin. It links as much as Kubernetes does: a minute and a half on two processors.
var calicoComponent = component{
	name: "calico", dir: "build/calico", sources: []string{"build/calico"}, pkg: "tool", parallel: 2,
}

// BuildCalico builds Calico's CNI plugin and returns its path.
func BuildCalico(ctx context.Context) (string, error) { return buildProgram(ctx, calicoComponent) }
