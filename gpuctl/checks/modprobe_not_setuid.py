"""nvidia-modprobe has lost its setuid bit or its owner, so users cannot get device nodes made.

The first program that uses the GPU asks nvidia-modprobe for nodes and modules. Without the setuid bit that works for
root alone: after root used the GPU once, everybody can, until the next boot. A service with NoNewPrivileges=yes has the
same trouble.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, nodes
from gpuctl.facts.nodes import CTL, UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DEVICES
PROGRAM = "/usr/bin/nvidia-modprobe"


def check(box: Box) -> Iterator[Finding]:
    if access.in_container(box) and access.privileged(box) is not True:
        return  # it could not make nodes there in any case
    program = box.guest.mapping("stat").get(PROGRAM)
    table = box.guest.get(nodes.NODES)
    user = box.wanted.user or box.guest.mapping("service").get("user")
    if table is None or user in (None, "root") or access.works(box):
        return
    missing = [path for path in (CTL, UVM) if (node := table.find(path)) is not None and node.kind == "missing"]
    if not missing:
        return
    if isinstance(program, dict) and "mode" in program:
        good = int(program["mode"]) & 0o4000 and program.get("uid") == 0
        what = f"{PROGRAM} is not setuid root (mode {int(program['mode']) & 0o7777:o}, owner {program.get('uid')})"
    else:
        node = nodes.parse_ls(str(box.guest.mapping("commands").get(f"ls -l {PROGRAM}", ""))).get(PROGRAM)
        if node is None or node.mode is None:
            return
        good = bool(node.mode & 0o4000) and node.uid in ("0", "root")
        what = f"{PROGRAM} is not setuid root (mode {node.mode:o}, owner {node.uid})"
    unit = box.guest.mapping("units").get(str(box.wanted.unit or box.guest.mapping("service").get("unit")))
    if good and isinstance(unit, dict) and unit.get("NoNewPrivileges") == "yes":
        good, what = (
            False,
            f"{box.wanted.unit or 'the unit'} has NoNewPrivileges=yes, so nvidia-modprobe cannot become root",
        )
    if good:
        return
    yield Finding(
        f"{what}, and {access.listed(missing)} must be made",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        (*access.symptom(box), what, *(str(table[path]) for path in missing)),
        advice=f"chown root:root {PROGRAM}; chmod u+s {PROGRAM}; or make the nodes at boot: nvidia-modprobe -c 0 "
        "-u as root",
    )
