"""nvidia-uvm is in its fatal state: every open of it fails until the module is loaded anew.

After a GPU error, a lost GPU or a suspend the module refuses everything (open gives EIO or a like error), while
nvidiactl opens and nvidia-smi works. CUDA fails with 999 on the machine and in all its containers.
"""

from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, kernel_log, nodes
from gpuctl.facts.nodes import UVM
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER
_SUSPEND = r"PM: suspend (entry|exit)|Suspending console|PM: resume"


def check(box: Box) -> Iterator[Finding]:
    word = access.opened(box, UVM)
    opens = box.node.get(nodes.OPENS)
    on_node = opens.of(UVM) if opens is not None else None
    if not {word, on_node} & {"EIO", "ENODEV", "EBUSY"}:
        return
    evidence = [*access.symptom(box), *access.opening(box, UVM)]
    if on_node is not None and box.node is not box.guest:
        evidence.append(f'open("{UVM}") on {box.node.name}: {on_node}')
    log = box.get_kernel(kernel_log.LINES) or ()
    xids = box.get_kernel(kernel_log.XIDS) or ()
    evidence += [xid.text for xid in xids[-2:]]
    slept = kernel_log.grep(log, _SUSPEND)
    evidence += slept[-1:]
    host = box.node if box.node.present else box.guest
    yield Finding(
        "nvidia-uvm is in its fatal state" + (", after a suspend" if slept and not xids else ""),
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED,
        tuple(evidence),
        advice=f"on {host.name}, stop everything that uses the GPUs (in all containers), then\n"
        "  rmmod nvidia_uvm && nvidia-modprobe -u -c 0\n"
        "nvidia-uvm may come back with another number: restart the containers and run gpuctl doctor all. Or reboot",
    )
