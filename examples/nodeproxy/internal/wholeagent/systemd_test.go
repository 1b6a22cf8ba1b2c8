//go:build linux

package wholeagent

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// systemd is a systemd in namespaces of its own, with few units.
type systemd struct {
	t   *testing.T
	pid string
}

// startSystemd starts systemd on a host of an emulated machine. Outside of one, it would act on
// this system's files and kernel.
func startSystemd(t *testing.T, h *netlab.Host) *systemd {
	t.Helper()
	netlab.NeedPrograms(t, "systemd", "systemctl")
	const units, group = "/etc/systemd/system", "/sys/fs/cgroup/systemd"
	for _, dir := range []string{units, group} {
		must.Do(t, os.MkdirAll(dir, 0o755))
	}
	for _, name := range []string{"sysinit", "basic", "multi-user", "shutdown", "network-online"} {
		put(t, units, name+".target", "[Unit]\nDefaultDependencies=no\n")
	}
	cgroup := must.Get(os.Open(group))(t)
	defer cgroup.Close()
	cmd := exec.Command("sh", "-c", `mount -t proc proc /proc && mount -t tmpfs run /run && umount /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup &&
		exec env -i container=test PATH=/sbin:/bin systemd --system --log-target=console --show-status=no --unit=basic.target`)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS, Unshareflags: syscall.CLONE_NEWCGROUP, UseCgroupFD: true, CgroupFD: int(cgroup.Fd()),
	}
	log := &process{}
	cmd.Stdout, cmd.Stderr = log, log
	must.Do(t, h.Start(cmd))
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		var groups []string
		filepath.WalkDir(group, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				groups = append(groups, path)
			}
			return nil
		})
		for i := range groups {
			os.Remove(groups[len(groups)-1-i])
		}
		os.RemoveAll(filepath.Dir(units))
		if t.Failed() {
			t.Logf("end of systemd's log:\n%s", log.log())
		}
	})
	s := &systemd{t: t, pid: strconv.Itoa(cmd.Process.Pid)}
	eventually(t, "systemd runs", func() bool { return s.ctl("is-active", "basic.target") == "active\n" })
	return s
}

// ctl runs systemctl and returns its output.
func (s *systemd) ctl(args ...string) string {
	out, _ := netlab.Command(s.t, "nsenter", append([]string{"-t", s.pid, "-m", "-p", "systemctl"}, args...)...).CombinedOutput()
	return string(out)
}

// show returns properties of the unit nodeproxy, as "VALUE VALUE".
func (s *systemd) show(properties string) string {
	return strings.Join(strings.Fields(s.ctl("show", "--value", "-p", properties, "nodeproxy")), " ")
}

// log returns what the unit nodeproxy has written to standard error.
func (s *systemd) log() string {
	text := must.Get(os.ReadFile("/proc/" + s.pid + "/root/run/nodeproxy.log"))(s.t)
	return string(text)
}

// TestUnitUnderSystemd runs the systemd unit of the folder deploy, in a machine. The kubeconfig
// comes after more starts than systemd allows by default. Then the unit serves in each mode, with its
// restricted rights, and is stopped.
func TestUnitUnderSystemd(t *testing.T) {
	testtime.NeedComplete(t)
	t.Parallel()
	if !vm.Inside(t, vm.Debian) {
		return
	}
	// Systemd acts on the system's files, and this test deletes its own: only the machine has this one.
	must.Get(os.Stat("/modules/order"))(t)
	text := must.Get(os.ReadFile("testdata/nodeproxy.service"))(t)
	s := newSite(t)
	object := func(text string) string {
		t.Helper()
		out := must.Get(yaml.YAMLToJSON([]byte(strings.Replace(text, "metadata:\n", "metadata:\n  namespace: default\n", 1))))(t)
		return string(out)
	}
	api := &fakeAPI{objects: map[string]string{
		"Service":       object(webService),
		"EndpointSlice": object(webSlice(podIPs[0])),
		"Node":          `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"},"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.1"}]}}`,
	}}
	l := must.Get(s.Node.Listen("tcp", "127.0.0.1:8080"))(t)
	server := &http.Server{Handler: api}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })

	const etc, bin = "/etc/nodeproxy", "/usr/local/bin"
	for _, dir := range []string{etc, bin, "/etc/systemd/system/nodeproxy.service.d"} {
		must.Do(t, os.MkdirAll(dir, 0o755))
	}
	t.Cleanup(func() { os.RemoveAll(etc) })
	t.Cleanup(func() { os.Remove(bin + "/nodeproxy") })
	must.Do(t, os.Symlink(testBinary(t), bin+"/nodeproxy"))
	configure := func(mode string) {
		put(t, etc, "config.yaml", kubeProxyConfig+"mode: "+mode+"\nhostnameOverride: n1\nclusterCIDR: 10.1.0.0/16\nclientConnection: {kubeconfig: "+etc+"/kubeconfig}\n")
	}
	configure("userspace")
	put(t, "/etc/systemd/system", "nodeproxy.service", string(text))
	put(t, "/etc/systemd/system/nodeproxy.service.d", "test.conf", "[Service]\nEnvironment="+programEnv+"=1\nStandardError=append:/run/nodeproxy.log\n")
	d := startSystemd(t, s.Node)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s", d.log())
		}
	})

	d.ctl("start", "nodeproxy")
	eventually(t, "six restarts", func() bool {
		n, _ := strconv.Atoi(d.show("NRestarts"))
		if state := d.show("ActiveState"); state == "failed" {
			t.Fatalf("the unit is %s after %d restarts", state, n)
		}
		return n >= 6
	})
	put(t, etc, "kubeconfig", `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:8080"}}]
contexts: [{name: x, context: {cluster: c}}]
current-context: x
`)
	// Mode ipvs is the last: its rules stay until the last connection has ended.
	for _, mode := range []string{"userspace", "nftables", "iptables", "ipvs"} {
		configure(mode)
		eventually(t, "it serves in mode "+mode, func() bool {
			_, answer, _ := get(t, s.Node, "http://127.0.0.1:10249/proxyMode")
			code, _, _ := get(t, s.Client, "http://192.0.2.1:10256/readyz")
			return answer == mode && code == 200
		})
		for _, to := range []string{clusterVIP, nodePort} {
			if mode == "userspace" && to == clusterVIP {
				continue // a port below 1024, for which the unit names another capability
			}
			// The rules of the last mode are removed at this time.
			if y := lab.Visits(s.Client, "", to, 5); !y.Answered(podIPs[0]) {
				t.Errorf("mode %s: %s is answered by %v", mode, to, y)
			}
		}
		if got := d.show("ActiveState,SubState"); got != "active running" {
			t.Errorf("mode %s: the unit is %s", mode, got)
		}
	}
	d.ctl("stop", "nodeproxy")
	if got := d.show("Result,ExecMainStatus,ActiveState"); got != "success 0 inactive" {
		t.Errorf("stopped: %s", got)
	}
	// The rules stay.
	s.answeredBy(t, clusterVIP, podIPs[0])
	for _, refused := range []string{"operation not permitted", "read-only file system", "forbidden"} {
		if strings.Contains(d.log(), refused) {
			t.Errorf("the log has %q", refused)
		}
	}
}
