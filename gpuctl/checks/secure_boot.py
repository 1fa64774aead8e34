"""Secure Boot refuses the NVIDIA module: it is signed with a key the firmware does not know.

DKMS signs with /var/lib/dkms/mok.key; the machine loads such modules only once that key was enrolled at the console
(MokManager, at the next boot). modprobe says "Key was rejected by service".
"""

from collections.abc import Iterator

from gpuctl.box import Box, Snapshot, Unknown
from gpuctl.facts import access, modules, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.DRIVER
_EFI = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def check(box: Box) -> Iterator[Finding]:
    if box.get_kernel(nvidia.MODULE_LOADED) or access.works(box):
        return
    host = box.node if box.node.present else box.guest
    lines = modules.rejected(box)
    state = secure_boot(host)
    if state is False or not (lines or state):
        return
    if not lines and box.get_kernel(nvidia.MODULE_LOADED) is not False:
        return
    evidence = [*access.symptom(box), *dict.fromkeys(lines)]
    if state is not None:
        evidence.append("Secure Boot is enabled")
    yield Finding(
        f"Secure Boot on {host.name} refuses the NVIDIA module" + ("" if lines else ", as it seems"),
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if lines else Certainty.POSSIBLE,
        tuple(evidence),
        separates="" if lines else "modprobe nvidia: 'Key was rejected by service' proves it",
        advice=f"on {host.name}: mokutil --import /var/lib/dkms/mok.pub, then reboot and enrol the key at the console; "
        "or switch Secure Boot off in the firmware",
    )


def secure_boot(host: Snapshot) -> bool | None:
    try:
        text = host.output("mokutil --sb-state").text
        if "enabled" in text or "disabled" in text:
            return "enabled" in text and "disabled" not in text
    except Unknown:
        pass
    try:
        data = host.file(_EFI)
        return data.strip().endswith("01") if data.startswith("hex:") else None
    except Unknown:
        return None
