package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// fieldManager owns what this command writes.
const fieldManager = "kubectl-stayput"

const (
	// releasePoll is how often an object is read until it is gone.
	releasePoll = 200 * time.Millisecond
	// releaseDoubt is how long the object of a freed address has to stay away. If someone else deleted it, the agent
	// publishes it again at once.
	releaseDoubt = time.Second
)

var (
	// errBound: only an address whose pod is gone can be released.
	errBound = errors.New("the address is in use")
	// errKept: the release was undone, or lost with its object before the agent read it.
	errKept = errors.New("the address is still retained")
	// errUnknown: the API server does not answer, or the object is gone but no agent runs that could have freed the
	// address.
	errUnknown = errors.New("it is not known whether the address is free")
)

// release is what the user asked for.
type release struct {
	all, yes, wait bool
	selector       string
	node           string
	dryRun         string
	timeout        time.Duration
}

func releaseCommand(s *settings) *cobra.Command {
	var o release
	format := newObjectFormat("released", false)
	cmd := &cobra.Command{
		Use:   "release (POD... | --all [-l SELECTOR] | --node NODE)",
		Short: "Release the addresses that are retained for pods that are gone",
		Long: `Release the addresses that are retained for pods that are gone, and wait until the
node, or the controller if they are of a pool, has freed them. Name the pods, or
their RetainedIPs or PodIPs. A bound address cannot be released: a pod uses it.

An address that has changed since it was read, for example because its pod came
back, is not released.

When a namespace is deleted, its RetainedIPs go with it, but a node keeps the
addresses if stayput.io/when-deleted is Retain. With --node the agent of that node
is asked to release all that it retains for the namespace.`,
		Example: `  kubectl stayput release web-2
  kubectl stayput release web-2.node-1
  kubectl stayput release --all -l app=web --dry-run=server
  kubectl stayput release --node node-1 --namespace gone`,
		ValidArgsFunction: s.complete(retainedPods, 0),
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, s, format, args) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.all, "all", false, "Release all retained addresses of the namespace")
	f.StringVarP(&o.selector, "selector", "l", "", "With --all: labels of the workload's pod template, such as app=web")
	f.StringVar(&o.node, "node", "", "Release what this node still retains for the namespace, which must be gone")
	f.BoolVarP(&o.yes, "yes", "y", false, "With --all or --node: do not ask for confirmation")
	f.StringVar(&o.dryRun, "dry-run", "none",
		"One of: (none, client, server). With client, only print what would be released;\n"+
			"with server, the API server also validates it")
	f.BoolVar(&o.wait, "wait", true, "Wait until the addresses are free")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "How long to wait")
	format.addFlags(cmd)
	err := cmd.RegisterFlagCompletionFunc("dry-run",
		cobra.FixedCompletions([]string{"none", "client", "server"}, cobra.ShellCompDirectiveNoFileComp))
	if err != nil {
		panic(err) // there is no such flag
	}
	return cmd
}

func (o *release) validate(args []string) error {
	switch {
	case o.node != "" && (o.all || len(args) > 0):
		return errors.New("--node: cannot be combined with names of pods or --all")
	case o.node != "" && o.dryRun == "server":
		return errors.New("--dry-run: with --node expected none or client: no object is changed")
	case o.all && len(args) > 0:
		return errors.New("POD: names cannot be combined with --all")
	case !o.all && o.node == "" && len(args) == 0:
		return errors.New("POD: expected names of pods, RetainedIPs or PodIPs, --all, or --node")
	case !o.all && o.selector != "":
		return errors.New("--selector: can only be used with --all")
	case o.timeout <= 0:
		return fmt.Errorf("--timeout: %s is not valid: expected more than 0", o.timeout)
	}
	switch o.dryRun {
	case "none", "client", "server":
		return nil
	}
	return fmt.Errorf("--dry-run: %q is not valid: expected none, client or server", o.dryRun)
}

func (o *release) run(cmd *cobra.Command, s *settings, format *objectFormat, args []string) error {
	if err := o.validate(args); err != nil {
		return err
	}
	wanted, err := names(args)
	if err != nil {
		return err
	}
	print, err := o.printer(format)
	if err != nil {
		return err
	}
	c, err := s.connect()
	if err != nil {
		return err
	}
	if o.node != "" {
		return o.runOn(cmd, c)
	}
	ctx := cmd.Context()
	retained, pooled, errs, err := o.choose(ctx, c, wanted)
	if err != nil {
		return err
	}
	if o.all && len(retained)+len(pooled) == 0 && len(errs) == 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "No addresses are retained in namespace %s.\n", c.namespace)
		return nil
	}
	if o.all && !o.yes && o.dryRun == "none" {
		if err := confirm(cmd, retained, pooled); err != nil {
			return err
		}
	}

	// Ask for all, then wait for all: the nodes work at the same time.
	var asked []stayputv1alpha1.RetainedIP
	for _, r := range retained {
		if err := o.ask(ctx, c, &r); err != nil {
			errs = append(errs, err)
			continue
		}
		asked = append(asked, r)
	}
	var askedOfPools []stayputv1alpha1.PodIP
	for _, p := range pooled {
		if err := o.ask(ctx, c, &p); err != nil {
			errs = append(errs, err)
			continue
		}
		askedOfPools = append(askedOfPools, p)
	}
	if o.wait && o.dryRun == "none" {
		var failed, late []error
		line := newProgress(cmd.ErrOrStderr())
		asked, failed = o.await(ctx, c, asked, line)
		askedOfPools, late = o.awaitPools(ctx, c, askedOfPools, line)
		errs = append(append(errs, failed...), late...)
	}
	for _, r := range asked {
		what := fmt.Sprintf("%s of node %s", ipsOf(&r), r.Spec.NodeName)
		if err := o.print(cmd, print, &r, what, *format.flags.OutputFormat); err != nil {
			return err
		}
	}
	for _, p := range askedOfPools {
		what := fmt.Sprintf("%s of pool %s", addressIn(&p), p.Spec.Pool)
		if err := o.print(cmd, print, &p, what, *format.flags.OutputFormat); err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}

// printer returns the printer for the format, which says that a dry run is one.
func (o *release) printer(format *objectFormat) (printers.ResourcePrinter, error) {
	var err error
	switch o.dryRun {
	case "client":
		err = format.flags.Complete("%s (dry run)")
	case "server":
		err = format.flags.Complete("%s (server dry run)")
	}
	if err != nil {
		return nil, err
	}
	return format.printer()
}

// choose returns the addresses that can be released, and an error for each named one that cannot.
func (o *release) choose(ctx context.Context, c *cluster, names []string) (
	retained []stayputv1alpha1.RetainedIP, pooled []stayputv1alpha1.PodIP, errs []error, err error) {
	ips, ofPools, errs, unseen, err := c.kept(ctx, names, o.selector)
	if err != nil {
		return nil, nil, nil, err
	}
	if unseen != nil && (o.all || len(errs) > 0) {
		errs = append(errs, fmt.Errorf("addresses of pools are not released: %w", unseen))
	}
	for _, r := range ips {
		switch {
		case r.Status.Phase == stayputv1alpha1.PhaseRetained:
			retained = append(retained, r)
		case !o.all:
			errs = append(errs, bound(&r))
		}
	}
	for _, p := range ofPools {
		switch {
		case phaseOf(&p) == stayputv1alpha1.PodIPRetained:
			pooled = append(pooled, p)
		case !o.all:
			errs = append(errs, boundOfPool(&p))
		}
	}
	return retained, pooled, errs, nil
}

func (o *release) print(cmd *cobra.Command, print printers.ResourcePrinter, r client.Object, what,
	format string) error {
	if format != "" {
		return print.PrintObj(r, cmd.OutOrStdout())
	}
	done := "released"
	switch {
	case o.dryRun == "client":
		done = "released (dry run)"
	case o.dryRun == "server":
		done = "released (server dry run)"
	case !o.wait:
		done = "release requested"
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s.stayput.io/%s %s: %s\n",
		strings.ToLower(r.GetObjectKind().GroupVersionKind().Kind), r.GetName(), done, printable(what))
	return err
}

// bound says why an address in use is not released, and what to do.
func bound(r *stayputv1alpha1.RetainedIP) error {
	todo := "delete the pod, or scale its workload down, then release it"
	if w := r.Spec.Workload; w != nil {
		todo = fmt.Sprintf("scale %s %s down, then release it", w.Kind, w.Name)
	}
	return fmt.Errorf("RetainedIP %s: %w: pod %s has %s on node %s: %s",
		r.Name, errBound, r.Spec.PodName, ipsOf(r), r.Spec.NodeName, todo)
}

// boundOfPool says it of an address of a pool.
func boundOfPool(p *stayputv1alpha1.PodIP) error {
	todo := "delete the pod, or scale its workload down, then release it"
	if w := p.Spec.Workload; w != nil {
		todo = fmt.Sprintf("scale %s %s down, then release it", w.Kind, w.Name)
	}
	return fmt.Errorf("PodIP %s: %w: it is %s for pod %s: %s",
		p.Name, errBound, strings.ToLower(string(phaseOf(p))), p.Spec.PodName, todo)
}

func confirm(cmd *cobra.Command, ips []stayputv1alpha1.RetainedIP, pooled []stayputv1alpha1.PodIP) error {
	w := cmd.ErrOrStderr()
	fmt.Fprintf(w, "The addresses of %s will be released. The pods get others when they come back:\n",
		count(len(ips)+len(pooled), "pod", "pods"))
	for i := range ips {
		line := fmt.Sprintf("%s  %s  node %s", ips[i].Spec.PodName, ipsOf(&ips[i]), ips[i].Spec.NodeName)
		fmt.Fprintf(w, "  %s\n", printable(line))
	}
	for i := range pooled {
		line := fmt.Sprintf("%s  %s  pool %s", pooled[i].Spec.PodName, addressIn(&pooled[i]), pooled[i].Spec.Pool)
		fmt.Fprintf(w, "  %s\n", printable(line))
	}
	return confirmed(cmd, "--all")
}

// confirmed asks whether to release what was shown because of a flag.
func confirmed(cmd *cobra.Command, flag string) error {
	if !interactive(cmd.InOrStdin()) {
		return fmt.Errorf("%s: standard input is not a terminal: confirm with --yes", flag)
	}
	fmt.Fprint(cmd.ErrOrStderr(), "Release them? (y/N) ")
	answer, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if err != nil {
		return err
	}
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		return nil
	}
	return errors.New("nothing was released")
}

// ask sets spec.release on the object exactly as it was read.
func (o *release) ask(ctx context.Context, k client.Client, r client.Object) error {
	if o.dryRun == "client" {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": r.GetUID(), "resourceVersion": r.GetResourceVersion()},
		"spec":     map[string]any{"release": true},
	})
	if err != nil {
		return err
	}
	options := []client.PatchOption{client.FieldOwner(fieldManager)}
	if o.dryRun == "server" {
		options = append(options, client.DryRunAll)
	}
	kind, name := r.GetObjectKind().GroupVersionKind(), r.GetName()
	switch err := k.Patch(ctx, r, client.RawPatch(types.MergePatchType, patch), options...); {
	case apierrors.IsConflict(err):
		return fmt.Errorf("%s %s has changed since it was read and was not released: try again: %w",
			kind.Kind, name, err)
	case apierrors.IsNotFound(err):
		return nil // free already
	case err != nil:
		return fmt.Errorf("%s %s: %w", kind.Kind, name, err)
	}
	r.GetObjectKind().SetGroupVersionKind(kind)
	return nil
}

// awaitPools waits until the controller has freed addresses of pools, upon which it deletes the objects, and returns
// those that are free.
func (o *release) awaitPools(ctx context.Context, k client.Client, asked []stayputv1alpha1.PodIP, line *progress) (
	free []stayputv1alpha1.PodIP, errs []error) {
	defer line.done()
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	for i, p := range asked {
		line.say("%d of %d: waiting until the controller has freed %s ...", i+1, len(asked), addressIn(&p))
		err := wait.PollUntilContextCancel(ctx, releasePoll, true, func(ctx context.Context) (bool, error) {
			var now stayputv1alpha1.PodIP
			err := k.Get(ctx, client.ObjectKeyFromObject(&p), &now)
			switch {
			case apierrors.IsNotFound(err):
				return true, nil
			case err != nil:
				return false, nil // it may be known later
			}
			return isFreeOfPool(&p, &now)
		})
		if wait.Interrupted(err) {
			err = fmt.Errorf("PodIP %s: the controller has not freed %s in time: kubectl describe podip %[1]s says what it "+
				"waits for", p.Name, addressIn(&p))
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		free = append(free, p)
	}
	return free, errs
}

// isFreeOfPool reports whether a released address of a pool is free, given the object that has its name now.
func isFreeOfPool(p, now *stayputv1alpha1.PodIP) (bool, error) {
	switch {
	case now.UID != p.UID:
		return true, nil // it is given again
	case now.Spec.PodUID != p.Spec.PodUID:
		return false, fmt.Errorf("PodIP %s: %w: pod %s came back before it was freed", p.Name, errBound, now.Spec.PodName)
	case !now.Spec.Release && now.DeletionTimestamp == nil:
		return false, fmt.Errorf("PodIP %s: %w: spec.release was unset meanwhile", p.Name, errKept)
	}
	return false, nil
}

// await waits until the nodes have freed the addresses, and returns those that are free.
func (o *release) await(ctx context.Context, c *cluster, asked []stayputv1alpha1.RetainedIP, line *progress) (
	free []stayputv1alpha1.RetainedIP, errs []error) {
	defer line.done()
	within, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	var gone []stayputv1alpha1.RetainedIP
	for i, r := range asked {
		line.say("%d of %d: waiting until node %s has freed %s ...", i+1, len(asked), r.Spec.NodeName, ipsOf(&r))
		if err := awaitOne(within, c, &r); err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, r)
	}
	if len(gone) == 0 {
		return nil, errs
	}
	line.say("making sure that they stay free ...")
	select {
	case <-ctx.Done():
		return nil, append(errs, ctx.Err())
	case <-time.After(releaseDoubt):
	}
	agents := map[string]error{}
	for _, r := range gone {
		node := r.Spec.NodeName
		if _, known := agents[node]; !known {
			_, agents[node] = (&agentPodsOf{client: c, namespace: c.installation}).on(ctx, node)
		}
		stays, err := isGone(ctx, c, &r)
		switch {
		case err == nil && !stays:
			err = late(&r)
		case err == nil && errors.Is(agents[node], ErrNoAgent): // without the right to list pods the object has to do
			err = fmt.Errorf("RetainedIP %s: %w: the object is gone, but %v: check again when its agent runs",
				r.Name, errUnknown, agents[node])
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		free = append(free, r)
	}
	return free, errs
}

// awaitOne waits until the agent has freed an address, upon which it deletes the object.
func awaitOne(ctx context.Context, k client.Client, r *stayputv1alpha1.RetainedIP) error {
	err := wait.PollUntilContextCancel(ctx, releasePoll, true, func(ctx context.Context) (bool, error) {
		free, err := isGone(ctx, k, r)
		if errors.Is(err, errUnknown) {
			return false, nil
		}
		return free, err
	})
	if wait.Interrupted(err) {
		return late(r)
	}
	return err
}

func late(r *stayputv1alpha1.RetainedIP) error {
	return fmt.Errorf("RetainedIP %s: node %s has not freed %s in time. "+
		"It will as soon as its agent runs and reaches the API server: see kubectl stayput check %s",
		r.Name, r.Spec.NodeName, ipsOf(r), r.Spec.NodeName)
}

// isGone reports whether the object of a released address is gone, or is that of another one. With errUnknown it could
// not be read.
func isGone(ctx context.Context, k client.Client, r *stayputv1alpha1.RetainedIP) (bool, error) {
	var now stayputv1alpha1.RetainedIP
	switch err := k.Get(ctx, client.ObjectKeyFromObject(r), &now); {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("RetainedIP %s: %w: %w", r.Name, errUnknown, err)
	}
	return isFree(r, &now)
}

// isFree reports whether a released address is free, given the object that has its name now.
func isFree(r, now *stayputv1alpha1.RetainedIP) (bool, error) {
	same := now.UID == r.UID
	shared := slices.ContainsFunc(now.Status.IPs, func(ip string) bool { return slices.Contains(r.Status.IPs, ip) })
	switch {
	case !same && !shared:
		return true, nil // the address of a later pod
	case now.Status.Phase == stayputv1alpha1.PhaseBound:
		return false, fmt.Errorf("RetainedIP %s: %w: pod %s came back before node %s could free it",
			r.Name, errBound, r.Spec.PodName, r.Spec.NodeName)
	case now.Spec.Release:
		return false, nil
	case same:
		return false, fmt.Errorf("RetainedIP %s: %w: spec.release was unset meanwhile", r.Name, errKept)
	}
	return false, fmt.Errorf("RetainedIP %s: %w: the object was deleted before node %s read the request, "+
		"and was published again: try again", r.Name, errKept, r.Spec.NodeName)
}
