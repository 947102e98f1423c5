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
	"k8s.io/cli-runtime/pkg/printers"
	"sigs.k8s.io/controller-runtime/pkg/client"

	stayputv1alpha1 "github.com/stayput/stayput/pkg/api/stayput/v1alpha1"
)

// fieldManager is what managedFields say of writes by this command.
const fieldManager = "kubectl-stayput"

const (
	// releasePoll is how often an address is looked at that is waited for.
	releasePoll = 200 * time.Millisecond
	// releaseDoubt is how long an object has to stay away that is gone: an agent publishes at once what it still
	// keeps, and whose object somebody has deleted.
	releaseDoubt = time.Second
)

var (
	// errBound: a release is for addresses that are kept for a pod that is gone.
	errBound = errors.New("the address is in use")
	// errKept: somebody deleted the object that was to be released, which releases nothing.
	errKept = errors.New("the address is still retained")
	// errUnknown: the API server does not answer, or the object is gone and no agent runs that could have freed its
	// addresses.
	errUnknown = errors.New("it is not known whether the address is free")
)

// release is what the verb was asked for.
type release struct {
	all, yes, wait bool
	selector       string
	dryRun         string
	timeout        time.Duration
}

func releaseCommand(c *cluster) *cobra.Command {
	var o release
	p := newPrinting("released", false)
	cmd := &cobra.Command{
		Use:   "release (POD... | --all [-l SELECTOR])",
		Short: "Give up addresses that are kept for pods that are gone",
		Long: "Give up addresses that are kept for pods that are gone, by the name of the pod or of its RetainedIP. The node frees\n" +
			"them, and this waits until it has. A bound address is refused: a pod uses it.\n\n" +
			"Only what was shown is released: what has changed since, such as by a pod that has come back, is refused.",
		Example: `  kubectl stayput release web-2
  kubectl stayput release web-2.node-1
  kubectl stayput release --all -l app=web --dry-run=server`,
		ValidArgsFunction: c.complete(func(ctx context.Context, k client.Client, namespace string) (all []string, err error) {
			ips, err := retainedIPs(ctx, k, namespace)
			for _, r := range ips {
				if r.Status.Phase == stayputv1alpha1.PhaseRetained {
					all = append(all, r.Spec.PodName)
				}
			}
			return all, err
		}, 0),
		RunE: func(cmd *cobra.Command, args []string) error { return o.run(cmd, c, p, args) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.all, "all", false, "all that are kept in the namespace")
	f.StringVarP(&o.selector, "selector", "l", "", "with --all: labels of the workload's pod template, such as app=web")
	f.BoolVarP(&o.yes, "yes", "y", false, "with --all: do not ask")
	f.StringVar(&o.dryRun, "dry-run", "none", "none; client: only say what would be released; server: have the API server judge it, and keep nothing")
	f.BoolVar(&o.wait, "wait", true, "wait until the addresses are free")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "how long to wait")
	p.addFlags(cmd)
	if err := cmd.RegisterFlagCompletionFunc("dry-run", cobra.FixedCompletions([]string{"none", "client", "server"}, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err)
	}
	return cmd
}

func (o *release) validate(args []string) error {
	switch {
	case o.all && len(args) > 0:
		return errors.New("POD: names cannot be combined with --all")
	case !o.all && len(args) == 0:
		return errors.New("POD: expected names of pods or RetainedIPs, or --all")
	case !o.all && o.selector != "":
		return errors.New("--selector: expected --all beside it")
	case o.timeout <= 0:
		return fmt.Errorf("--timeout: %s is not valid: expected more than 0", o.timeout)
	}
	switch o.dryRun {
	case "none", "client", "server":
		return nil
	}
	return fmt.Errorf("--dry-run: %q is not valid: expected none, client or server", o.dryRun)
}

func (o *release) run(cmd *cobra.Command, c *cluster, p *printing, args []string) error {
	if err := o.validate(args); err != nil {
		return err
	}
	wanted, err := names(args)
	if err != nil {
		return err
	}
	switch o.dryRun {
	case "client":
		err = p.flags.Complete("%s (dry run)")
	case "server":
		err = p.flags.Complete("%s (server dry run)")
	}
	if err != nil {
		return err
	}
	print, err := p.printer()
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	ns, err := c.namespace(false)
	if err != nil {
		return err
	}
	k, err := c.client()
	if err != nil {
		return err
	}

	// 1. Which ones.
	ips, err := retainedIPs(ctx, k, ns)
	if err != nil {
		return err
	}
	ips, missing := pick(ips, wanted)
	var errs []error
	for _, name := range missing {
		errs = append(errs, fmt.Errorf("no address is kept for %s in namespace %s", name, ns))
	}
	if ips, err = matching(ctx, k, ips, ns, o.selector); err != nil {
		return err
	}
	var kept []stayputv1alpha1.RetainedIP
	for _, r := range ips {
		switch {
		case r.Status.Phase == stayputv1alpha1.PhaseRetained:
			kept = append(kept, r)
		case !o.all:
			errs = append(errs, bound(&r))
		}
	}
	if o.all && len(kept) == 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "No addresses are retained in namespace %s.\n", ns)
		return nil
	}

	// 2. Is that meant?
	if o.all && !o.yes && o.dryRun == "none" {
		if err := confirm(cmd, kept); err != nil {
			return err
		}
	}

	// 3. All requests, then all waits: nodes work at the same time.
	var asked []stayputv1alpha1.RetainedIP
	for _, r := range kept {
		if o.dryRun != "client" {
			if err := o.ask(ctx, k, &r); err != nil {
				errs = append(errs, err)
				continue
			}
		}
		asked = append(asked, r)
	}
	if o.wait && o.dryRun == "none" {
		line := newProgress(cmd.ErrOrStderr())
		var failed []error
		asked, failed = o.await(ctx, k, c.home, asked, line)
		line.done()
		errs = append(errs, failed...)
	}
	for _, r := range asked {
		if err := o.print(cmd, print, &r, *p.flags.OutputFormat); err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}

func (o *release) print(cmd *cobra.Command, print printers.ResourcePrinter, r *stayputv1alpha1.RetainedIP, format string) error {
	if format != "" {
		return print.PrintObj(r, cmd.OutOrStdout())
	}
	ips := strings.Join(r.Status.IPs, ", ")
	word := "released"
	switch {
	case o.dryRun == "client":
		word = "released (dry run)"
	case o.dryRun == "server":
		word = "released (server dry run)"
	case !o.wait:
		word = "release requested"
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "retainedip.stayput.io/%s %s: %s of node %s\n", r.Name, word, ips, r.Spec.NodeName)
	return err
}

// bound says why an address in use is not released, and what to do.
func bound(r *stayputv1alpha1.RetainedIP) error {
	todo := "delete the pod, or scale its workload down, and release it then"
	if w := r.Spec.Workload; w != nil {
		todo = fmt.Sprintf("scale %s %s down, and release it then", w.Kind, w.Name)
	}
	return fmt.Errorf("RetainedIP %s: %w: pod %s has %s on node %s: %s", r.Name, errBound, r.Spec.PodName, strings.Join(r.Status.IPs, ", "), r.Spec.NodeName, todo)
}

func confirm(cmd *cobra.Command, ips []stayputv1alpha1.RetainedIP) error {
	w := cmd.ErrOrStderr()
	fmt.Fprintf(w, "%d addresses are given up; their pods get others when they come back:\n", len(ips))
	for _, r := range ips {
		fmt.Fprintf(w, "  %s  %s  node %s\n", r.Spec.PodName, strings.Join(r.Status.IPs, ","), r.Spec.NodeName)
	}
	if !interactive(cmd.InOrStdin()) {
		return errors.New("--all: nobody can be asked here: expected --yes beside it")
	}
	fmt.Fprint(w, "Release them? (y/N) ")
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

// ask sets spec.release on the very object that was read.
func (o *release) ask(ctx context.Context, k client.Client, r *stayputv1alpha1.RetainedIP) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": r.UID, "resourceVersion": r.ResourceVersion},
		"spec":     map[string]any{"release": true},
	})
	if err != nil {
		return err
	}
	options := []client.PatchOption{client.FieldOwner(fieldManager)}
	if o.dryRun == "server" {
		options = append(options, client.DryRunAll)
	}
	was := *r
	switch err := k.Patch(ctx, r, client.RawPatch(types.MergePatchType, patch), options...); {
	case apierrors.IsConflict(err):
		return fmt.Errorf("RetainedIP %s has changed since it was looked at, so that nothing was released: look again and repeat it: %w", was.Name, err)
	case apierrors.IsNotFound(err):
		*r = was // free already
		return nil
	case err != nil:
		return fmt.Errorf("RetainedIP %s: %w", was.Name, err)
	}
	r.SetGroupVersionKind(was.GroupVersionKind())
	return nil
}

// await waits until the nodes have freed the addresses, and returns those that they have.
func (o *release) await(ctx context.Context, k client.Client, home string, asked []stayputv1alpha1.RetainedIP, line *progress) (free []stayputv1alpha1.RetainedIP, errs []error) {
	within, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	var gone []stayputv1alpha1.RetainedIP
	for i, r := range asked {
		line.say("%d of %d: waiting until node %s has freed %s ...", i+1, len(asked), r.Spec.NodeName, strings.Join(r.Status.IPs, ", "))
		if err := freed(within, k, &r); err != nil {
			errs = append(errs, err)
			continue
		}
		gone = append(gone, r)
	}
	if len(gone) == 0 {
		return nil, errs
	}
	line.say("looking whether that lasts ...")
	if !outlasts(ctx, releaseDoubt) {
		return nil, append(errs, ctx.Err())
	}
	agents := map[string]error{}
	for _, r := range gone {
		node := r.Spec.NodeName
		if _, asked := agents[node]; !asked {
			_, agents[node] = (&agentPodsOf{client: k, namespace: home}).on(ctx, node)
		}
		lasts, err := look(ctx, k, &r)
		switch {
		case err == nil && !lasts:
			err = late(&r)
		case err == nil && isNoAgent(agents[node]): // who may not look for agents goes by the object alone
			err = fmt.Errorf("RetainedIP %s: %w: the object is gone, but %v: look again when it runs", r.Name, errUnknown, agents[node])
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		free = append(free, r)
	}
	return free, errs
}

// freed waits until the agent has freed the addresses, which it says by deleting the object.
func freed(ctx context.Context, k client.Client, r *stayputv1alpha1.RetainedIP) error {
	for {
		if free, err := look(ctx, k, r); free || err != nil && !errors.Is(err, errUnknown) {
			return err
		}
		if !outlasts(ctx, releasePoll) {
			return late(r)
		}
	}
}

func late(r *stayputv1alpha1.RetainedIP) error {
	return fmt.Errorf("RetainedIP %s: node %s has not freed %s in time; it will as soon as its agent runs and reaches the API server (kubectl stayput check %s)",
		r.Name, r.Spec.NodeName, strings.Join(r.Status.IPs, ", "), r.Spec.NodeName)
}

// look says whether addresses are free whose release was asked for. With errUnknown it could not be seen.
func look(ctx context.Context, k client.Client, r *stayputv1alpha1.RetainedIP) (bool, error) {
	var now stayputv1alpha1.RetainedIP
	switch err := k.Get(ctx, client.ObjectKeyFromObject(r), &now); {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("RetainedIP %s: %w: %w", r.Name, errUnknown, err)
	}
	return isFree(r, &now)
}

// isFree compares an object whose release was asked for with the one that has its name now.
func isFree(r, now *stayputv1alpha1.RetainedIP) (bool, error) {
	same := now.UID == r.UID
	switch {
	case !same && !slices.ContainsFunc(now.Status.IPs, func(ip string) bool { return slices.Contains(r.Status.IPs, ip) }):
		return true, nil // the promise to a later pod
	case now.Status.Phase == stayputv1alpha1.PhaseBound:
		return false, fmt.Errorf("RetainedIP %s: %w: pod %s came back before node %s could free it", r.Name, errBound, r.Spec.PodName, r.Spec.NodeName)
	case now.Spec.Release:
		return false, nil
	case same:
		return false, fmt.Errorf("RetainedIP %s: %w: somebody took the release back", r.Name, errKept)
	}
	return false, fmt.Errorf("RetainedIP %s: %w: somebody deleted the object before node %s saw what was asked for, and it was published again: repeat it", r.Name, errKept, r.Spec.NodeName)
}

// outlasts waits, and says whether the context lasted as long.
func outlasts(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
