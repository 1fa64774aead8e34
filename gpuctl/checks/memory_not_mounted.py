"""The memory file system that models are served from is not mounted.

Its path is then a folder on a disk, or not there. The unit that mounts it at boot failed, or was never placed; a model
copied there would fill the disk, and be gone from sight as soon as the file system is mounted over it.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

from gpuctl.box import Box
from gpuctl.facts import serving
from gpuctl.finding import Finding, Layer, Remedy

LAYER = Layer.MODEL


def check(box: Box) -> Iterator[Finding]:
    folders: dict[str, list[str]] = {}
    for model in box.guest.get(serving.MODELS, ()):
        folder = str(PurePosixPath(model.path).parent)
        if model.in_memory and not model.why and model.mount is None:
            folders.setdefault(folder, []).append(model.name)
    for folder, names in folders.items():
        yield Finding(
            f"no memory file system is mounted at {folder}",
            LAYER,
            evidence=(f"{', '.join(names)} is to be served from there",),
            remedy=Remedy("tmpfs", {"folder": folder, "models": names}),
            advice="gpuctl restore mounts it, now and at each boot; or playbooks/tmpfs.yml",
        )
