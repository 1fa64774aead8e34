"""CUDA_VISIBLE_DEVICES names no GPU of this machine.

Empty, -1, an index that does not exist, or the UUID of a card that was replaced: CUDA then sees no device and cuInit
fails with 100; with one named twice (`0,0`) it fails with 101. What counts is the environment of the service, not that
of the shell in which one looks.
"""

import re
from collections.abc import Iterator

from gpuctl.box import Box
from gpuctl.facts import access, env, nvidia
from gpuctl.finding import Certainty, Finding, Layer, Severity

LAYER = Layer.CUDA


def check(box: Box) -> Iterator[Finding]:
    values = box.guest[env.ENV]
    if "CUDA_VISIBLE_DEVICES" not in values:
        return
    value = values["CUDA_VISIBLE_DEVICES"]
    problem = what_is_wrong(box, value)
    code = access.code(box)
    if problem is None or code not in (None, 0, 100, 101):  # it gives 100 or 101 and nothing else
        return
    source = box.guest.get(env.ENV_SOURCE, "environment")
    works = access.works(box)
    unit = box.wanted.unit or box.guest.mapping("service").get("unit")
    where = f"the environment of {unit}" if unit else "the service's environment"
    yield Finding(
        f"CUDA_VISIBLE_DEVICES={value!r} leaves CUDA without a device",
        LAYER,
        Severity.WARNING if works else Severity.CRITICAL,
        Certainty.PROVED if code in (100, 101) else Certainty.LIKELY,
        (*access.symptom(box), f"{source}: CUDA_VISIBLE_DEVICES={value!r}", problem),
        ("cuInit = 0",) if works else (),
        "" if code in (100, 101) else "cuInit without CUDA_VISIBLE_DEVICES",
        advice=f"correct or remove it in {where}, then restart the service; nvidia-smi -L shows indices and UUIDs",
    )


def what_is_wrong(box: Box, value: str) -> str | None:
    """Why this value names no GPU, or one twice; None where it is right, or where that is not known.

    As libcuda reads it (measured, driver 580): words between commas, up to the first that names no GPU of the kind the
    first one was; numbers as strtoul has them, 32 bits of them (`1x` is 1, ` 0` is 0); UUIDs by their beginning, in
    the case they have. Nothing chosen: 100. One chosen twice: 101.
    """
    stripped = value.strip()
    if stripped in ("", "-1", "none", "void", "NoDevFiles"):
        return "it is empty: no device" if not stripped else f"{stripped} means: no device"
    count, uuids = gpus(box)
    by_number = re.match(r"\s*[+-]?\d", value) is not None
    seen: set[str] = set()
    for number, word in enumerate(value.split(",")):
        one, problem = named(word, by_number, count, uuids)
        if one is None:
            return problem if number == 0 else None
        if one in seen:
            return f"{word.strip()} is there twice: CUDA then refuses all"
        seen.add(one)
    return None


def named(word: str, by_number: bool, count: int | None, uuids: set[str]) -> tuple[str | None, str | None]:
    """The GPU a word names, or why it names none; (None, None) where that is not known."""
    index = re.match(r"\s*([+-]?\d+)", word)
    if by_number and index is not None:
        chosen = int(index.group(1)) & 0xFFFFFFFF
        if count is not None and chosen >= count:
            if word.strip().startswith("-"):
                return None, f"{word.strip()} is no index: no device"
            return (
                None,
                f"there {'is' if count == 1 else 'are'} {count} GPU{'s' if count != 1 else ''}, numbered from 0",
            )
        return str(chosen), None
    if not by_number and word.lower().startswith(("gpu-", "mig-")):
        if not uuids:
            return None, None
        found = [uuid for uuid in sorted(uuids) if uuid.startswith(word)]
        return (found[0], None) if found else (None, f"no GPU has this UUID; there are {', '.join(sorted(uuids))}")
    return None, f"{word.strip()!r} is neither an index nor a UUID"


def gpus(box: Box) -> tuple[int | None, set[str]]:
    """Number of the GPUs this guest has; UUIDs of those, or of all GPUs of the machine."""
    nvml = box.guest.get(nvidia.NVML)
    known = box.get_kernel(nvidia.DRIVER_GPUS) or ()
    uuids = {gpu.uuid for gpu in known if gpu.uuid}
    count = len(known) if known and not access.in_container(box) else None
    table = access.guest_nodes(box)
    if table is not None and table.gpus():
        count = len(table.gpus())
    if nvml is not None and nvml.works:
        count = nvml.count or len(nvml.gpus) or count
        uuids |= {gpu.uuid for gpu in nvml.gpus if gpu.uuid}
        if any(gpu.mig for gpu in nvml.gpus):
            uuids = set()  # those of MIG devices are not known
    return count, uuids
