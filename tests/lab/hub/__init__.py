"""A double of the Hugging Face hub for loopback and lab networks, spoken to by the real client through HF_ENDPOINT.

    with Hub() as hub:
        hub.commit("Qwen/Qwen3.6-27B", folder)
        hub.faults.add(Fault("stall", "*.safetensors", after=1 << 20))
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}

By hand: `python -m tests.lab.hub FOLDER` serves FOLDER/<owner>/<name>; see its --help.
"""

from tests.lab.hub.faults import Fault, Faults
from tests.lab.hub.repositories import File, Repository
from tests.lab.hub.server import Hub

__all__ = ["Fault", "Faults", "File", "Hub", "Repository"]
