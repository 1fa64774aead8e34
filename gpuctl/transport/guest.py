"""An LXC guest through its Proxmox VE node: `Guest`, on `pct exec`. The guest needs no sshd and no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuctl.transport.contract import Completed, Refused, Transport, Unreachable, ended, limited


class Guest:
    """Guest `vmid` of a node. `node` is how the node is reached, as root. Commands run as the guest's root."""

    def __init__(self, name: str, node: Transport, vmid: int) -> None:
        self.name = name
        self.node = node
        self.vmid = vmid
        # Without it the node's environment leaks into the guest; releases before it had no such option and did leak.
        self._clean = ["--keep-env", "0"]

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout: float | None = None,
        on_stdout: Callable[[bytes], None] | None = None,
    ) -> Completed:
        command = ["pct", "exec", str(self.vmid), *self._clean, "--", *limited(argv, timeout)]
        done = self.node.run(command, stdin=stdin, timeout=timeout, on_stdout=on_stdout)
        if done.rc == 0:
            return done
        done = Completed(ended(done.rc), done.stdout, done.stderr)
        said = done.stderr.decode("utf-8", "replace")
        if self._clean and "Unknown option: keep-env" in said:
            self._clean = []
            return self.run(argv, stdin=stdin, timeout=timeout, on_stdout=on_stdout)
        where = f"{self.name}: guest {self.vmid} on {self.node.name}"
        if f"container '{self.vmid}' not running" in said:
            raise Unreachable(f"{where} is not running; start it there: pct start {self.vmid}")
        if f"lxc/{self.vmid}.conf' does not exist" in said:
            raise Refused(f"{where} does not exist; see `pct list` there, and gpuctl_vmid in the inventory")
        if done.rc == 127 and "pct" in said and not said.startswith("lxc-attach"):
            raise Refused(f"{where} cannot be reached: there is no `pct`; is {self.node.name} a Proxmox VE node?")
        if said.startswith(f"lxc-attach: {self.vmid}: ") and "Failed to exec" not in said:
            raise Unreachable(f"{where} cannot be entered: {said.splitlines()[0]}")
        return done

    def close(self) -> None:
        self.node.close()
