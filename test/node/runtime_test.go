package node

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/stayput/stayput/test/lab"
)

// runtimeName is the nodes' runtime: go test ./test/node -runtime crio.
var runtimeName = flag.String("runtime", "", "container runtime of the nodes, such as crio or containerd-1.7")

func onCRIO() bool { return *runtimeName == "crio" }

// criSocket is the flag by which the agent finds the runtime.
func criSocket() string {
	if onCRIO() {
		return "--cri-socket=" + lab.CRIOSocket
	}
	return "--cri-socket=" + lab.CRISocket
}

type oneRuntimes struct {
	test func(*testing.T)
	why  string
}

const (
	severalNetworks = "CRI-O attaches a pod to one network, containerd to as many as its max_conf_num says"
	swapsByHand     = "CRI-O ends a pod as it started: see TestCRIOEndsAPodByTheConfigurationOfItsStart"
)

// These tests run on one runtime alone, all others on every one.
var (
	containerdsTests = []oneRuntimes{
		{TestAPodOnTwoNetworksHasTwoInterfaces, severalNetworks},
		{TestAPodComesBackWithItsAddressInEveryNetwork, severalNetworks},
		{TestPodsWithSeveralNetworksGetNoAdditionalOne, severalNetworks},
		{TestARuntimeThatComesBackWithOtherPluginsIsNotedAtOnce, "CRI-O does not say where its plugins are"},
		{TestPodsOfHostLocalComeBackWithTheirAddressesAfterTheSwap, swapsByHand},
		{TestAnAddressReusedByHostLocalIsNotRestored, swapsByHand},
		{TestAWaitingReplacementGetsTheAddressWithoutARetry, "on CRI-O it needs a retry: " +
			"see TestCRIOStopsAPodOnceItsReplacementHasBeenRefused"},
		{TestContainerdKilledDuringARestoreLosesNothing, "CRI-O, killed while runc makes a pause, leaves that in a " +
			"namespace with the address: see TestCRIOKilledDuringAnADDLosesNothing"},
	}
	criosTests = []oneRuntimes{
		{TestAPodComesBackWithItsAddressAfterCRIOWasWipedAtBoot, "containerd keeps its sandboxes over a boot"},
		{TestAPodComesBackWithItsAddressAfterAnotherVersionOfCRIOWipedIt, "containerd keeps its sandboxes over an upgrade"},
		{TestCRIOEndsAPodByTheConfigurationOfItsStart, "containerd ends it by the present configuration"},
		{TestCRIOStopsAPodOnceItsReplacementHasBeenRefused, "containerd stops it while its replacement waits"},
		{TestCRIOKilledDuringAnADDLosesNothing, "see TestContainerdKilledDuringARestoreLosesNothing"},
	}
)

// leaveOut has the other runtime's tests not run.
func leaveOut() error {
	others := criosTests
	if onCRIO() {
		others = containerdsTests
	}
	var names []string
	for _, o := range others {
		name := runtime.FuncForPC(reflect.ValueOf(o.test).Pointer()).Name()
		name = name[strings.LastIndex(name, ".")+1:]
		if testing.Verbose() {
			fmt.Fprintf(os.Stderr, "left out: %s: %s\n", name, o.why)
		}
		names = append(names, "^"+name+"$")
	}
	if own := flag.Lookup("test.skip").Value.String(); own != "" {
		names = append(names, own)
	}
	return flag.Set("test.skip", strings.Join(names, "|"))
}
