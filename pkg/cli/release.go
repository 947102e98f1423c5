package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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
	// releaseDoubt is how long the object of a freed address has to stay away. If another program deleted it, the agent
	// publishes it again at once.
	releaseDoubt = time.Second
)

var (
	// errBound says that only an address whose pod is gone can be released.
	errBound = errors.New("the address is in use")
	// errKept says that the release was undone, or lost with its object before the agent read it.
	errKept = errors.New("the address is still retained")
	// errUnknown: the API server does not answer, or the object is gone but no agent runs that could have freed the
	// address.
	errUnknown = errors.New("unknown whether the address is free")
)

// release is what the user asked for.
type release struct {
	consent
	all, wait bool
	selector  string
	node      string
	timeout   time.Duration
}

func releaseCommand(s *settings) *cobra.Command {
	var o release
	format := newObjectFormat("released", false)
	cmd := &cobra.Command{
		Use:   "release (POD... | --all [-l SELECTOR] | --node NODE)",
		Short: "Release the addresses retained for deleted pods",
		Long: `Release the addresses retained for deleted pods, and wait until the node, or the
controller for pool addresses, has freed them. Name the pods, or their RetainedIPs or
PodIPs. A bound address cannot be released: a pod uses it.

It shows what it will release and asks for confirmation, unless --yes is given. If
standard input is not a terminal, it releases nothing without --yes. An address that
has changed since it was read, for example because its pod came back, is not released.

When a namespace is deleted, its RetainedIPs are deleted too, but a node keeps the
addresses if stayput.io/when-deleted is Retain. With --node, that node's agent
releases everything that it retains for the namespace.`,
		Example: `  kubectl stayput release web-2
  kubectl stayput release web-2.node-1
  kubectl stayput release --all -l app=web --dry-run=server
  kubectl stayput release --node node-1 --namespace gone`,
		ValidArgsFunction: s.complete(retainedPods, 0),
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, s, format, args) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.all, "all", false, "Release all retained addresses of the namespace")
	f.StringVarP(&o.selector, "selector", "l", "",
		"With --all: label selector on the workload's pod template, for example app=web")
	f.StringVar(&o.node, "node", "",
		"Release what this node still retains for the namespace, which must have been deleted")
	f.BoolVar(&o.wait, "wait", true, "Wait until the addresses are free")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "How long to wait")
	o.addFlags(cmd, "With client, only print what would be released;\nwith server, the API server also validates it",
		dryRunNone, dryRunClient, dryRunServer)
	format.addFlags(cmd)
	return cmd
}

func (o *release) validate(args []string) error {
	switch {
	case o.node != "" && (o.all || len(args) > 0):
		return errors.New("--node: cannot be combined with names of pods or --all")
	case o.node != "" && o.dryRun == dryRunServer:
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
	return nil
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
	if err := o.consent.validate(cmd); err != nil {
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
	chosen, errs, err := o.choose(ctx, c, wanted)
	if err != nil {
		return err
	}
	if o.all && len(chosen) == 0 && len(errs) == 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "No addresses are retained in namespace %s.\n", c.namespace)
		return nil
	}
	if len(chosen) > 0 {
		if err := o.ask(cmd, "Release them?", func() error { return writePlan(cmd.ErrOrStderr(), chosen) }); err != nil {
			return errors.Join(append(errs, err)...)
		}
	}

	// Ask for all, then wait for all: the nodes work at the same time.
	var asked []*keptIP
	for _, k := range chosen {
		if err := o.request(ctx, c, k); err != nil {
			errs = append(errs, err)
			continue
		}
		asked = append(asked, k)
	}
	if o.wait && !o.dry() {
		var failed []error
		asked, failed = o.await(ctx, c, asked, newProgress(cmd.ErrOrStderr()))
		errs = append(errs, failed...)
	}
	for _, k := range asked {
		if err := o.print(cmd, print, k, *format.flags.OutputFormat); err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}

// printer returns the printer for the format, which says that a dry run is one.
func (o *release) printer(format *objectFormat) (printers.ResourcePrinter, error) {
	if note := o.note(); note != "" {
		if err := format.flags.Complete("%s" + note); err != nil {
			return nil, err
		}
	}
	return format.printer()
}

// choose returns what can be released, and an error for each named one that cannot.
func (o *release) choose(ctx context.Context, c *cluster, names []string) (chosen []*keptIP, errs []error, err error) {
	kept, errs, unseen, err := c.kept(ctx, names, o.selector)
	if err != nil {
		return nil, nil, err
	}
	if unseen != nil && o.all {
		return nil, nil, fmt.Errorf("--all: nothing is released: which pool addresses are retained is unknown: %w. "+
			"Name the pods, to release what nodes retain for them", unseen)
	}
	if unseen != nil && len(errs) > 0 {
		errs = append(errs, fmt.Errorf("pool addresses are not released: %w", unseen))
	}
	for _, k := range kept {
		switch {
		case k.retained():
			chosen = append(chosen, k)
		case !o.all:
			errs = append(errs, inUse(k))
		}
	}
	return chosen, errs, nil
}

func (o *release) print(cmd *cobra.Command, print printers.ResourcePrinter, k *keptIP, format string) error {
	if format != "" {
		return print.PrintObj(k.Object, cmd.OutOrStdout())
	}
	done := "released" + o.note()
	if !o.wait && !o.dry() {
		done = "release requested"
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s.stayput.io/%s %s: %s\n", strings.ToLower(k.kind()), k.GetName(), done,
		printable(k.addresses()+" of "+k.keeper()))
	return err
}

// inUse says why addresses that a pod has are not released, and what to do.
func inUse(k *keptIP) error {
	todo := "delete the pod, or scale its workload down, then release it"
	if w := k.workload; w != nil {
		todo = fmt.Sprintf("scale %s %s down, then release it", w.Kind, w.Name)
	}
	return fmt.Errorf("%s %s: %w: %s is %s for pod %s: %s",
		k.kind(), k.GetName(), errBound, k.about(), strings.ToLower(orNone(k.phase)), k.pod, todo)
}

// writePlan says what will be released.
func writePlan(w io.Writer, chosen []*keptIP) error {
	var b strings.Builder
	fmt.Fprintf(&b, "The addresses of %s will be released. The pods get new ones when they come back:\n",
		count(len(chosen), "pod", "pods"))
	for _, k := range chosen {
		fmt.Fprintf(&b, "  %s\n", printable(fmt.Sprintf("%s  %s  %s", k.pod, k.addresses(), k.keeper())))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// request sets spec.release on the object exactly as it was read.
func (o *release) request(ctx context.Context, c client.Client, k *keptIP) error {
	if o.dryRun == dryRunClient {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": k.GetUID(), "resourceVersion": k.GetResourceVersion()},
		"spec":     map[string]any{"release": stayputv1alpha1.ReleaseNow},
	})
	if err != nil {
		return err
	}
	options := []client.PatchOption{client.FieldOwner(fieldManager)}
	if o.dryRun == dryRunServer {
		options = append(options, client.DryRunAll)
	}
	gvk, name := k.GetObjectKind().GroupVersionKind(), k.GetName()
	switch err := c.Patch(ctx, k.Object, client.RawPatch(types.MergePatchType, patch), options...); {
	case apierrors.IsConflict(err):
		return fmt.Errorf("%s %s has changed since it was read and was not released, try again: %w", gvk.Kind, name, err)
	case apierrors.IsNotFound(err):
		return nil // free already
	case err != nil:
		return fmt.Errorf("%s %s: %w", gvk.Kind, name, err)
	}
	k.GetObjectKind().SetGroupVersionKind(gvk)
	return nil
}

// await waits until the nodes, and the controller, have freed the addresses, and returns those that are free.
func (o *release) await(ctx context.Context, c *cluster, asked []*keptIP, line *progress) (
	free []*keptIP, errs []error) {
	defer line.done()
	within, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	var gone []*keptIP
	doubt := false
	for i, k := range asked {
		line.say("%d of %d: waiting until %s has freed %s ...", i+1, len(asked), k.freer(), k.addresses())
		if err := k.awaitFree(within, c); err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, k)
		doubt = doubt || k.retainedIP() != nil
	}
	if !doubt {
		return gone, errs
	}
	line.say("verifying that they stay free ...")
	select {
	case <-ctx.Done():
		return nil, append(errs, ctx.Err())
	case <-time.After(releaseDoubt):
	}
	agents := map[string]error{} // why it is not known that one runs, by node
	for _, k := range gone {
		var err error
		if k.retainedIP() != nil {
			if _, known := agents[k.node]; !known {
				_, agents[k.node] = (&agentPodsOf{client: c, namespace: c.installation}).on(ctx, k.node)
			}
			err = k.stayedFree(ctx, c, agents[k.node])
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		free = append(free, k)
	}
	return free, errs
}

// freer names what frees the addresses.
func (k *keptIP) freer() string {
	if k.podIP() != nil {
		return "the controller"
	}
	return k.keeper()
}

// awaitFree waits until released addresses are free, upon which their object is deleted.
func (k *keptIP) awaitFree(ctx context.Context, c client.Client) error {
	err := wait.PollUntilContextCancel(ctx, releasePoll, true, func(ctx context.Context) (bool, error) {
		free, err := k.isFree(ctx, c)
		if errors.Is(err, errUnknown) {
			return false, nil
		}
		return free, err
	})
	if wait.Interrupted(err) {
		return k.late()
	}
	return err
}

// stayedFree returns an error if the object of freed addresses is there again, or if it may be only the object that is
// gone. agent is why no agent runs on the node, nil if one does.
func (k *keptIP) stayedFree(ctx context.Context, c client.Client, agent error) error {
	switch free, err := k.isFree(ctx, c); {
	case err != nil:
		return err
	case !free:
		return k.late()
	case errors.Is(agent, ErrNoAgent): // without the right to list pods the object has to do
		return fmt.Errorf("%s %s: %w: the object was deleted, but %v: check again when its agent is running",
			k.kind(), k.GetName(), errUnknown, agent)
	}
	return nil
}

func (k *keptIP) late() error {
	todo := ". It will once its agent is running and reaches the API server: see kubectl stayput check " + k.node
	if k.podIP() != nil {
		todo = ": kubectl describe podip " + k.GetName() + " shows what it waits for"
	}
	return fmt.Errorf("%s %s: %s has not freed %s in time%s", k.kind(), k.GetName(), k.freer(), k.addresses(), todo)
}

// isFree reports whether released addresses are free. With errUnknown their object could not be read.
func (k *keptIP) isFree(ctx context.Context, c client.Client) (bool, error) {
	var now client.Object = &stayputv1alpha1.RetainedIP{}
	if k.podIP() != nil {
		now = &stayputv1alpha1.PodIP{}
	}
	switch err := c.Get(ctx, client.ObjectKeyFromObject(k), now); {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("%s %s: %w: %w", k.kind(), k.GetName(), errUnknown, err)
	}
	return k.isFreeBy(keptOf(now))
}

// isFreeBy reports whether released addresses are free, given what the object says that has their name now.
func (k *keptIP) isFreeBy(now *keptIP) (bool, error) {
	same := now.GetUID() == k.GetUID()
	shared := slices.ContainsFunc(now.ips, func(ip string) bool { return slices.Contains(k.ips, ip) })
	back := now.bound()
	if k.podIP() != nil {
		// The controller deletes the PodIP once the address is free: another one is of the next pod.
		shared, back = false, now.podUID != k.podUID
	}
	switch {
	case !same && !shared:
		return true, nil // the address of a later pod
	case back:
		return false, fmt.Errorf("%s %s: %w: pod %s came back before %s could free it",
			k.kind(), k.GetName(), errBound, now.pod, k.freer())
	case now.releasing:
		return false, nil
	case same:
		return false, fmt.Errorf("%s %s: %w: spec.release was unset in the meantime", k.kind(), k.GetName(), errKept)
	}
	return false, fmt.Errorf("%s %s: %w: the object was deleted before %s read the request, and has been published "+
		"again: try again", k.kind(), k.GetName(), errKept, k.freer())
}
