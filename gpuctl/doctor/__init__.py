"""`gpuctl doctor`: what is wrong with a box, proved, and how to mend it.

read_snapshots, box_from   from files to a box
diagnose                   what is wrong
render_text, as_json, explain   for people and for programs
heal, together             plays remedies until the box is clean or nothing helps any more
saved                      snapshots as one document that may be mailed
"""

from gpuctl.doctor.boxes import box_from, read_snapshots, saved
from gpuctl.doctor.diagnosis import Diagnosis, diagnose, ids
from gpuctl.doctor.healing import Healing, Played, Step, heal, together, wrong
from gpuctl.doctor.telling import as_json, explain, render_healing, render_text
from gpuctl.snapshots import NotASnapshot

__all__ = [
    "Diagnosis",
    "Healing",
    "NotASnapshot",
    "Played",
    "Step",
    "as_json",
    "box_from",
    "diagnose",
    "explain",
    "heal",
    "ids",
    "read_snapshots",
    "render_healing",
    "render_text",
    "saved",
    "together",
    "wrong",
]
