"""Names of errors, from the ways people and programs write them."""

from __future__ import annotations

import re

OK = "OK"

# Texts of strerror(3) and of shells for the errnos that opening a device can give (doctor.md: one errno, one layer).
_TEXTS = {
    "operation not permitted": "EPERM",
    "permission denied": "EACCES",
    "no such file or directory": "ENOENT",
    "no such device or address": "ENXIO",
    "no such device": "ENODEV",
    "input/output error": "EIO",
    "inappropriate ioctl for device": "ENOTTY",
    "device or resource busy": "EBUSY",
    "read-only file system": "EROFS",
    "invalid argument": "EINVAL",
    "too many open files": "EMFILE",
    "cannot allocate memory": "ENOMEM",
    "timed out": "hang",
    "hangs": "hang",
    "hang": "hang",
    "missing": "ENOENT",
    "does not exist": "ENOENT",
    "not found": "ENOENT",
    "absent": "ENOENT",
    "refused": "EPERM",
    "denied": "EPERM",
    "works": OK,
    "fine": OK,
    "opens": OK,
    "success": OK,
    "yes": OK,
    "0": OK,
}
_NUMBERS = {
    "1": "EPERM",
    "2": "ENOENT",
    "5": "EIO",
    "6": "ENXIO",
    "12": "ENOMEM",
    "13": "EACCES",
    "16": "EBUSY",
    "19": "ENODEV",
    "22": "EINVAL",
    "24": "EMFILE",
    "25": "ENOTTY",
    "30": "EROFS",
}
KNOWN = frozenset(_NUMBERS.values()) | {OK, "hang", "EMFILE", "ETIMEDOUT"}


def errno_name(word: object) -> str | None:
    """`EPERM`, "errno 1", 1, "Operation not permitted", "cannot open: Permission denied" -> the name; OK; None."""
    text = str(word).strip()
    found = re.search(r"\b(E[A-Z]{2,})\b", text)
    if found and found.group(1) in KNOWN:
        return found.group(1)
    low = text.lower().strip(" .")
    if low == "ok":
        return OK
    found = re.fullmatch(r"-?(?:\[?errno\]?[ =:]*)?-?(\d+)\]?", low)
    if found and (found.group(1) in _NUMBERS or found.group(1) == "0"):
        return _NUMBERS.get(found.group(1), OK)
    if low in _TEXTS:
        return _TEXTS[low]
    for phrase, name in _TEXTS.items():
        if " " in phrase and phrase in low:
            return name
    return None
