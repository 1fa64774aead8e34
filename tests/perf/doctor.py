"""How long `gpuctl doctor` takes: this machine, one box over SSH, 32 at once; beside `ansible -m setup` on the same ones.

    doctor.py [--boxes 32] [--rounds 3] [--write]       needs root: each box is a network namespace with an sshd of its own

The boxes share this machine's cores, so what many of them take is this machine's doing as well; the ratio is what tells.
`--write` puts the result into docs/doctor.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "doctor.md"
START, END = "<!-- times -->\n", "<!-- /times -->\n"
sys.path.insert(0, str(ROOT))

from tests.sshd import SSHD, make_key  # noqa: E402

NET = "203.0.113"  # set aside for documentation (RFC 5737): no route should lead there
BRIDGE = "gpuctl-perf"
AIM_S = 2.0
BIN = Path(sys.executable).parent


def sh(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@contextmanager
def bridge() -> Iterator[None]:
    """A bridge with an address of its own. Nothing of the machine's own network is touched."""
    used = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
    if f" {NET}." in used:
        raise SystemExit(f"{NET}.0/24 is in use here")
    sh("ip", "link", "add", BRIDGE, "type", "bridge")
    try:
        sh("ip", "address", "add", f"{NET}.1/24", "dev", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")
        yield
    finally:
        sh("ip", "link", "delete", BRIDGE)


@contextmanager
def box(number: int, folder: Path) -> Iterator[None]:
    """A network namespace with an sshd on its port 22."""
    name, wire = f"gpuctl-perf-{number}", f"gpp{number}"
    sh("ip", "netns", "add", name)
    daemon = None
    try:
        sh("ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", name)
        sh("ip", "link", "set", wire, "master", BRIDGE, "up")
        for words in (["link", "set", "lo", "up"], ["address", "add", f"{NET}.{number + 10}/24", "dev", "eth0"],
                      ["link", "set", "eth0", "up"]):  # fmt: skip
            sh("ip", "-n", name, *words)
        with (folder / "sshd.log").open("ab") as log:
            command = ["ip", "netns", "exec", name, SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        yield
    finally:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in listed.split():  # the sshd and the sessions Ansible keeps open
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if daemon is not None:
            daemon.wait()
        subprocess.run(["ip", "link", "delete", wire], stderr=subprocess.DEVNULL, check=False)
        sh("ip", "netns", "delete", name)


def furnished(folder: Path, boxes: int) -> Path:
    """Keys, sshd_config and an inventory. Returns the inventory's folder."""
    Path("/run/sshd").mkdir(exist_ok=True)
    host, key = make_key(folder / "host_key"), make_key(folder / "key")
    (folder / "authorized_keys").write_bytes(key.with_suffix(".pub").read_bytes())
    (folder / "sshd_config").write_text(
        f"HostKey {host}\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\nMaxStartups 200\nSubsystem sftp internal-sftp\n"
    )
    kind, blob = host.with_suffix(".pub").read_text().split()[:2]
    addresses = [f"{NET}.{number + 10}" for number in range(boxes)]
    (folder / "known_hosts").write_text("".join(f"{address} {kind} {blob}\n" for address in addresses))
    inventory = folder / "inventory"
    inventory.mkdir()
    (inventory / "hosts.yml").write_text(
        "all:\n  vars:\n    ansible_user: root\n    ansible_python_interpreter: /usr/bin/python3\n"
        f"    ansible_ssh_private_key_file: {key}\n"
        f"    ansible_ssh_common_args: -o UserKnownHostsFile={folder}/known_hosts\n  hosts:\n"
        + "".join(f"    box{number}:\n      ansible_host: {address}\n" for number, address in enumerate(addresses))
    )
    (folder / "here").mkdir()
    (folder / "here" / "hosts.yml").write_text("all:\n  hosts:\n    here:\n      ansible_connection: local\n")
    return inventory


def timed(command: Sequence[str], wanted: int, folder: Path) -> float:
    """Seconds. Raises where not every box answered: a failure is no time."""
    environment = {**os.environ, "ANSIBLE_PIPELINING": "1", "ANSIBLE_HOME": str(folder / "ansible"),
                   "ANSIBLE_SSH_ARGS": "-o ControlMaster=no"}  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if "--json" in command:
        found = json.loads(done.stdout)
        answered = sum(bool(one.get("machines")) for one in found.get("boxes", [found]))
    else:
        answered = done.stdout.count("| SUCCESS =>")
    if answered != wanted:
        raise SystemExit(f"{answered} of {wanted} answered: {done.stderr[-500:]}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boxes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        inventory = furnished(folder, options.boxes)
        stack.enter_context(bridge())
        for number in range(options.boxes):
            stack.enter_context(box(number, folder))
        time.sleep(1)
        doctor = [str(BIN / "gpuctl"), "doctor", "--json", "-i"]
        ansible = [str(BIN / "ansible"), "-m", "setup", "-f", str(options.boxes), "-i"]
        many = str(options.boxes)
        cases = {
            ("this machine", "gpuctl doctor"): ([*doctor, str(folder / "here")], 1),
            ("this machine", "ansible -m setup"): ([*ansible, str(folder / "here"), "all"], 1),
            ("one box over SSH", "gpuctl doctor"): ([*doctor, str(inventory), "-t", "box0"], 1),
            ("one box over SSH", "ansible -m setup"): ([*ansible, str(inventory), "box0"], 1),
            (f"{many} boxes at once", "gpuctl doctor"): ([*doctor, str(inventory), "-t", "all"], options.boxes),
            (f"{many} boxes at once", "ansible -m setup"): ([*ansible, str(inventory), "all"], options.boxes),
        }
        for command, wanted in list(cases.values())[:4]:
            timed(command, wanted, folder)  # the first reads the disk
        times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        for _ in range(options.rounds):
            for case, (command, wanted) in cases.items():
                times[case].append(timed(command, wanted, folder))
    lines = [
        f"Made by `make perf` on {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC: {os.cpu_count()} cores for "
        f"everything, Linux {platform.release()}, Python {platform.python_version()}; medians in one run "
        f"(rounds: {options.rounds}; load of the machine before it: {load:.1f}),",
        "seconds, the programs' own start included. The boxes are network namespaces of one machine without a GPU, each "
        "with an sshd; both",
        "connect anew, and Ansible has pipelining and as many forks as there are boxes.",
        "",
        "| | gpuctl doctor | ansible -m setup | ratio |",
        "|---|---:|---:|---:|",
    ]
    for what in dict.fromkeys(what for what, _ in cases):
        ours, theirs = (statistics.median(times[what, who]) for who in ("gpuctl doctor", "ansible -m setup"))
        lines.append(f"| {what} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.1f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(START)
        after = rest.partition(END)[2]
        DOCUMENT.write_text(before + START + text + END + after, encoding="utf-8")
    return 0 if statistics.median(times["one box over SSH", "gpuctl doctor"]) < AIM_S else 1


if __name__ == "__main__":
    sys.exit(main())
