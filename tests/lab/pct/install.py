"""Puts the double of pve-container into a node's root, where the real package has its parts."""

from __future__ import annotations

import shutil
from pathlib import Path

HERE = Path(__file__).parent
MODULES = ("conf", "lxcconfig", "guests", "hooks", "hotplug", "cli", "pvesh")
PACKAGE = "usr/lib/python3/dist-packages/pve_container"

# program -> where it starts
PROGRAMS = {
    "usr/sbin/pct": "cli:main",
    "usr/bin/pvesh": "pvesh:main",
    "usr/share/lxc/hooks/lxc-pve-prestart-hook": "hooks:hook",
    "usr/share/lxc/hooks/lxc-pve-autodev-hook": "hooks:hook",
    "usr/share/lxc/hooks/lxc-pve-poststop-hook": "hooks:hook",
    "usr/share/lxc/lxcnetaddbr": "hooks:net_up",
}

_PROGRAM = """\
#!/usr/lib/pve-container/python3 -I
import sys
from pve_container.{module} import {function}
sys.exit({function}())
"""

_STOP_WRAPPER = """\
#!/bin/sh
# $1: the vmid. A guest that rebooted itself is started anew, `systemctl stop` stops it, anything else was its own wish.
case "$1" in *[!0-9]*|"") exit 0 ;; esac
test -e "/etc/pve/lxc/$1.conf" || exit 0
if rm "/var/lib/lxc/$1/reboot" 2>/dev/null; then
    exec systemctl --no-block restart "pve-container@$1.service"
elif test "${EXIT_CODE:-none}" != exited; then
    exec lxc-stop -n "$1"
fi
"""

_FILES = {
    "usr/share/lxc/config/common.conf.d/01-pve.conf": (
        "lxc.hook.pre-start = /usr/share/lxc/hooks/lxc-pve-prestart-hook\n"
        "lxc.hook.autodev = /usr/share/lxc/hooks/lxc-pve-autodev-hook\n"
        "lxc.hook.post-stop = /usr/share/lxc/hooks/lxc-pve-poststop-hook\n"
    ),
    # An unprivileged guest may open every device its ids may: the rules of common.conf are taken back.
    "usr/share/lxc/config/userns.conf.d/01-pve.conf": (
        "lxc.cgroup2.devices.deny =\nlxc.cgroup2.devices.allow =\nlxc.cgroup2.devices.allow = a\n"
    ),
    "usr/lib/tmpfiles.d/pve.conf": "d /run/pve 0755 root root\nd /run/lock/lxc 0755 root root\n",
    "etc/subuid": "root:100000:65536\n",
    "etc/subgid": "root:100000:65536\n",
    "usr/lib/systemd/system/pve-container@.service": """\
[Unit]
Description=PVE LXC Container: %i
DefaultDependencies=No
Documentation=man:lxc-start man:lxc man:pct

[Service]
Type=simple
Delegate=yes
KillMode=mixed
TimeoutStopSec=120s
ExecStart=/usr/bin/lxc-start -F -n %i
ExecStop=/usr/share/lxc/pve-container-stop-wrapper %i
StandardOutput=null
StandardError=file:/run/pve/ct-%i.stderr
""",
    "usr/lib/systemd/system/pve-guests.service": """\
[Unit]
Description=PVE guests
ConditionPathExists=/usr/bin/pvesh
RefuseManualStart=true
RefuseManualStop=true
After=network.target vmbr0.service

[Service]
ExecStart=/usr/bin/pvesh --nooutput create /nodes/localhost/startall
ExecStop=/usr/bin/pvesh --nooutput create /nodes/localhost/stopall
Type=oneshot
RemainAfterExit=yes
TimeoutSec=infinity

[Install]
WantedBy=multi-user.target
""",
}


def install_node(root: Path, nodename: str) -> None:
    for file, text in _FILES.items():
        _write(root / file, text)
    _write(root / "usr/share/lxc/pve-container-stop-wrapper", _STOP_WRAPPER, 0o755)
    for file, place in PROGRAMS.items():
        module, function = place.split(":")
        _write(root / file, _PROGRAM.format(module=module, function=function), 0o755)
    _write(root / PACKAGE / "__init__.py", "")
    for name in MODULES:
        _write(root / PACKAGE / f"{name}.py", (HERE / f"{name}.py").read_text(encoding="utf-8"))
    # The real pct is Perl: it does not stop working when the node's python3 is gone.
    (python,) = root.glob("usr/bin/python3.[0-9]*[0-9]")
    (root / "usr/lib/pve-container").mkdir()
    shutil.copy(python, root / "usr/lib/pve-container/python3")
    wants = root / "etc/systemd/system/multi-user.target.wants/pve-guests.service"
    wants.parent.mkdir(parents=True, exist_ok=True)
    wants.symlink_to("/usr/lib/systemd/system/pve-guests.service")
    # /etc/pve/nodes is shared by the nodes of a cluster; a node finds its own guests through this link.
    (root / "etc/pve/nodes").mkdir(parents=True)
    (root / "etc/pve/lxc").symlink_to(f"nodes/{nodename}/lxc")


def _write(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)
