package lab

import (
	"bytes"
	"net"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
)

// A machine that is switched on or off must not cut the others off from the API server: they have its hardware address.
func TestTheFabricKeepsItsHardwareAddress(t *testing.T) {
	runtime.LockOSThread() // Pdeathsig watches the thread
	defer runtime.UnlockOSThread()
	machine := exec.Command("sleep", "infinity") // keeps the network namespace
	machine.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := machine.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = machine.Process.Kill()
		_ = machine.Wait()
	})
	if err := makeFabric(machine.Process.Pid, 0); err != nil {
		t.Fatal(err)
	}
	err := withNetlink(machine.Process.Pid, func(h *netlink.Handle) error {
		address := func() net.HardwareAddr {
			bridge, err := h.LinkByName(fabricBridge)
			if err != nil {
				t.Fatal(err)
			}
			return bridge.Attrs().HardwareAddr
		}
		before := address()
		bridge, err := h.LinkByName(fabricBridge)
		if err != nil {
			return err
		}
		port := &netlink.Veth{PeerName: Uplink, LinkAttrs: netlink.LinkAttrs{
			Name: "port", MasterIndex: bridge.Attrs().Index, HardwareAddr: net.HardwareAddr{0x02, 0, 0, 0, 0, 1},
		}}
		if err := h.LinkAdd(port); err != nil {
			return err
		}
		if now := address(); !bytes.Equal(before, now) {
			t.Errorf("%v, and %v with a machine", before, now)
		}
		return h.LinkDel(port)
	})
	if err != nil {
		t.Fatal(err)
	}
}
