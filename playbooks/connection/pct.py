"""Ansible connection: an LXC guest through its Proxmox VE node's `pct exec`. The guest needs no sshd and no network."""

from __future__ import annotations

import shlex

from ansible import context
from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.connection import ConnectionBase
from ansible.plugins.loader import connection_loader
from ansible.template import Templar
from ansible.vars.manager import VariableManager

DOCUMENTATION = """
name: pct
short_description: a guest through its node's pct exec
description:
  - Runs everything by C(pct exec) on the guest's node, which is reached as the inventory says of it (SSH or local).
author: gpuctl
extends_documentation_fragment:
  - connection_pipelining
options:
  node:
    description: Name of the node in the inventory.
    required: true
    type: str
    vars:
      - name: gpuctl_node
  vmid:
    description: Number of the guest on its node.
    required: true
    type: int
    vars:
      - name: gpuctl_vmid
"""

_nodes: dict[str, dict] = {}  # variables of nodes; a worker asks for one only once


def _variables(node: str) -> dict:
    """The node's own variables: Ansible hands a connection only those of its own machine."""
    if node not in _nodes:
        loader = DataLoader()
        inventory = InventoryManager(loader=loader, sources=list(context.CLIARGS["inventory"]))
        host = inventory.get_host(node)
        if host is None:
            raise AnsibleError(f"gpuctl_node: no machine {node} in the inventory")
        found = VariableManager(loader=loader, inventory=inventory).get_vars(host=host, include_hostvars=False)
        templar = Templar(loader=loader, variables=found)
        _nodes[node] = {
            name: templar.template(value)
            for name, value in found.items()
            if name.startswith("ansible_") or name == "inventory_hostname"
        }
    return _nodes[node]


class Connection(ConnectionBase):
    transport = "pct"
    has_pipelining = True
    always_pipeline_modules = True

    _inner = None

    def _connect(self) -> Connection:
        if self._inner is None:
            found = _variables(self.get_option("node"))
            kind = "local" if found.get("ansible_connection") in ("local", "ansible.builtin.local") else "ssh"
            play = self._play_context.copy()
            play.remote_addr = found.get("ansible_host", self.get_option("node"))
            self._inner = connection_loader.get(f"ansible.builtin.{kind}", play, shell=self._shell)
            self._inner.set_options(var_options=found)
            become = str(found.get("ansible_become", "")).lower() in ("true", "yes", "1")
            self._before = "sudo -n " if become and found.get("ansible_user") != "root" else ""
            self._connected = True
        return self

    def _line(self, cmd: str) -> str:
        vmid = int(self.get_option("vmid"))
        return f"{self._before}pct exec {vmid} --keep-env 0 -- /bin/sh -c {shlex.quote(cmd)}"

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True):
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        self._connect()
        rc, out, err = self._inner.exec_command(self._line(cmd), in_data=in_data, sudoable=False)
        said = err if isinstance(err, str) else err.decode("utf-8", "replace")
        gone = ("not running", f"lxc/{self.get_option('vmid')}.conf' does not exist")
        if rc != 0 and any(words in said for words in gone):
            raise AnsibleConnectionFailure(said.strip())
        return rc, out, err

    def put_file(self, in_path: str, out_path: str) -> None:
        super().put_file(in_path, out_path)
        try:
            with open(in_path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            raise AnsibleFileNotFound(f"{in_path} is not there") from None
        rc, _, err = self.exec_command(f"cat > {shlex.quote(out_path)}", in_data=data, sudoable=False)
        if rc != 0:
            raise AnsibleError(f"{out_path} cannot be written: {err!r}")

    def fetch_file(self, in_path: str, out_path: str) -> None:
        super().fetch_file(in_path, out_path)
        rc, out, err = self.exec_command(f"cat {shlex.quote(in_path)}", sudoable=False)
        if rc != 0:
            raise AnsibleError(f"{in_path} cannot be read: {err!r}")
        with open(out_path, "wb") as file:
            file.write(out if isinstance(out, bytes) else out.encode())

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._inner = None
        self._connected = False
