"""A running container lost its GPUs when systemd reloaded its units.

With the systemd cgroup driver `systemctl daemon-reload` writes a container's device rules anew, and drops devices that
have no link in /dev/char. Later NVML says "Unknown Error" in a container that worked for days.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, devices, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CONTAINER


def check(box: Box) -> Iterator[Finding]:
    nvml = box.guest.get(nvidia.NVML)
    told = " ".join(str(line) for s in box.snapshots for line in s.document.get("errors", ()))
    inner = access.inner(box) or re.search(r"\bdocker\b|\bcontainerd\b|kubernetes|\bpod\b", told)
    if nvml is None or nvml.rc != 999 or not inner or access.conf(box) is not None:
        return
    reload = access.rules_dropped(box)
    links = box.guest.mapping("links") or box.node.mapping("links")
    linked = any(path.startswith(f"/dev/char/{devices.NVIDIA_MAJOR}:") for path in links)
    refused = [refusal for refusal in access.refused(box) if refusal.number.major == devices.NVIDIA_MAJOR]
    evidence = access.seen(box, refused)
    if reload:
        evidence.append(f"told: {reload}")
    if "links" in box.node.document or "links" in box.guest.document:
        evidence.append(f"/dev/char has {'links' if linked else 'no links'} for 195")
    certain = bool(refused and reload) and not linked
    yield Finding(
        "the container lost its device rules, as after systemctl daemon-reload",
        LAYER,
        Severity.CRITICAL,
        Certainty.PROVED if certain else Certainty.LIKELY,
        tuple(evidence),
        separates=""
        if certain
        else "does a container started anew work, and fail after systemctl daemon-reload on the host?",
        advice="recreate the container; so that it does not come back, on the host: nvidia-ctk system "
        "create-dev-char-symlinks "
        "--create-all (and a udev rule for it), or pass the nodes with --device, or the cgroupfs driver of docker",
    )
