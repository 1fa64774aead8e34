"""Boxes as they are now: every machine of them probed side by side, one round trip each; or just glanced at."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuctl.box import Box, Snapshot, Wanted
from gpuctl.hosts import Inventory, Machine, through_node, transports
from gpuctl.snapshots import NotASnapshot, read
from gpuctl.transport import Transport, TransportError, Unreachable, agent, each

PROBE_S = 60.0  # a probe takes two seconds; more than this is a machine that hangs
PATIENCE_S = 2.0  # for so long boxes are kept in order; then whoever has answered comes
MANY = 64  # machines at once; they wait for answers, not for us


@dataclass(frozen=True)
class Asked:
    """A box and its snapshots; or, where its guest did not answer, why. `missing`: machine -> why it was not asked."""

    name: str
    box: Box | None
    snapshots: tuple[Snapshot, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)


def ask(inventory: Inventory, names: Sequence[str], *, unit: str | None = None, user: str | None = None) -> list[Asked]:
    """The boxes of these names (`all`, groups; none: the guests), in their order. See `asking`."""
    order = [machine.name for machine in inventory.chosen(names)]
    return sorted(asking(inventory, names, unit=unit, user=user), key=lambda asked: order.index(asked.name))


def asking(
    inventory: Inventory,
    names: Sequence[str],
    *,
    unit: str | None = None,
    user: str | None = None,
    on_wait: Callable[[list[str]], None] = lambda names: None,
) -> Iterator[Asked]:
    """Boxes as their answers come: a machine that hangs or refuses delays no other.

    Those that answered within two seconds come in the order of the inventory. `unit`, `user`: the service whose
    environment and rights are looked at beside root's. `on_wait` hears after two seconds, then every ten, who has not
    answered. Raises BadInventory at once.
    """
    machines = inventory.chosen(names)
    service = {key: value for key, value in (("unit", unit), ("user", user)) if value}
    return _asking(inventory, machines, service, on_wait)


def _asking(
    inventory: Inventory,
    machines: Sequence[Machine],
    service: dict[str, str],
    on_wait: Callable[[list[str]], None],
) -> Iterator[Asked]:
    ways = transports(inventory)
    jobs: dict[str, dict[str, Any]] = {}
    for machine in machines:
        jobs[machine.name] = _job(machine, service)
        if machine.kind == "guest" and machine.node and machine.node in inventory.machines:
            node_job = jobs.setdefault(machine.node, {"name": machine.node, "role": "node", "vmids": []})
            if machine.vmid is not None:
                node_job.setdefault("vmids", []).append(machine.vmid)

    def work(way: Transport) -> Snapshot | TransportError:
        machine, job = inventory.machines[way.name], jobs[way.name]
        try:
            return probe(way, job)
        except Unreachable as first:  # a guest whose sshd does not answer is asked through its node
            if not _has_node(machine, inventory):
                raise
            try:
                answer = probe(through_node(machine, ways), job)
            except TransportError:
                raise first from None
            if isinstance(answer, TransportError):
                raise first from None
            return answer

    answers: dict[str, Any] = {}
    heard: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
    broken: list[BaseException] = []

    def all_of_them() -> None:
        try:
            each(
                [ways[name] for name in jobs],
                work,
                limit=MANY,
                timeout=PROBE_S,
                on_answer=lambda name, answer: heard.put((name, answer)),
            )
        except BaseException as error:  # noqa: BLE001 - it goes to the thread that asked
            broken.append(error)
        heard.put(None)

    threading.Thread(target=all_of_them, name="asking", daemon=True).start()
    waiting, ended, early = list(machines), False, True
    told = time.monotonic() + PATIENCE_S
    try:
        while not ended:
            try:
                answer = heard.get(timeout=max(0.0, told - time.monotonic()))
            except queue.Empty:
                on_wait([name for name in jobs if name not in answers])
                told, early = time.monotonic() + 10, False
            else:
                if answer is None:
                    ended = True
                else:
                    answers[answer[0]] = answer[1]
            while waiting:
                ready = [machine for machine in waiting if _complete(machine, answers)]
                if not ready or (early and not ended and ready[0] is not waiting[0]):
                    break
                waiting.remove(ready[0])
                yield _asked(ready[0], answers)
        if broken:
            raise broken[0]
    finally:
        for name, way in ways.items():
            if name in jobs and name not in answers:  # it hangs, and closing it would
                threading.Thread(target=way.close, name=f"close {name}", daemon=True).start()
            else:
                way.close()


def _has_node(machine: Machine, inventory: Inventory) -> bool:
    return machine.connection != "pct" and machine.node in inventory.machines and machine.vmid is not None


def _complete(machine: Machine, answers: Mapping[str, Any]) -> bool:
    """Have all machines of the box answered, as far as they are asked?"""
    asked = [machine.name, *([machine.node] if machine.kind == "guest" and machine.node else [])]
    return all(name in answers for name in asked)


def _job(machine: Machine, service: dict[str, str]) -> dict[str, Any]:
    job: dict[str, Any] = {"name": machine.name, "role": machine.kind}
    if service:
        job["service"] = service
    return job


def probe(way: Transport, job: dict[str, Any]) -> Snapshot | TransportError:
    """A snapshot of the machine at the end of `way`, by a job of the probe; or why there is none."""
    command, stdin = agent("probe", job)
    done = way.run(command, stdin=stdin, timeout=PROBE_S)
    if done.rc == 127:
        return TransportError(f"{way.name}: no python3 there; install it (apt install python3-minimal)")
    try:
        (snapshot,) = read(done.text, way.name)
    except (NotASnapshot, ValueError):
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or done.text.strip().splitlines()
        return TransportError(
            f"{way.name}: the probe did not answer: {said[-1][:200] if said else f'status {done.rc}'}"
        )
    return snapshot


def _asked(machine: Machine, answers: dict[str, Any]) -> Asked:
    guest = answers[machine.name]
    node = answers.get(machine.node or "") if machine.kind == "guest" else None
    missing = {
        name: str(answer)
        for name, answer in ((machine.name, guest), (machine.node or "", node))
        if isinstance(answer, TransportError)
    }
    wanted = Wanted(name=machine.name, vmid=machine.vmid, node=machine.node or "")
    seen = node if isinstance(node, Snapshot) else None
    if isinstance(guest, TransportError):
        if seen is None:
            return Asked(machine.name, None, (), missing)
        absent = Snapshot.absent(str(guest))
        return Asked(machine.name, Box(absent, seen, wanted), (seen,), missing)
    if machine.kind == "node":
        return Asked(machine.name, Box(guest, guest, wanted), (guest,), missing)
    snapshots = (guest, seen) if seen is not None else (guest,)
    return Asked(machine.name, Box(guest, seen, wanted), snapshots, missing)


GLANCE_S = 30.0


class Glancing:
    """Light looks at machines (agent/glance.py), as often as it is called, over connections that stay open.

    A guest whose sshd does not answer is looked at through its node.
    """

    def __init__(self, inventory: Inventory, names: Sequence[str], models: Sequence[str]) -> None:
        self._machines = [inventory.machines[name] for name in names]
        self._inventory = inventory
        self._ways = transports(inventory)
        self._job = {"models": list(models)}

    def __enter__(self) -> Glancing:
        return self

    def __exit__(self, *_: object) -> None:
        for way in self._ways.values():
            way.close()

    def __call__(self) -> dict[str, Mapping[str, Any] | TransportError]:
        """By name: the answer, or why there is none. "sshd" in it: why it had to be asked through its node."""
        names = [machine.name for machine in self._machines]
        answers = each([self._ways[name] for name in names], self._look, timeout=GLANCE_S)
        lost = [m for m in self._machines if isinstance(answers[m.name], Unreachable) and _has_node(m, self._inventory)]
        if lost:
            again = each([through_node(m, self._ways) for m in lost], self._look, timeout=GLANCE_S)
            answers |= {
                name: {**found, "sshd": str(answers[name])}
                for name, found in again.items()
                if not isinstance(found, TransportError)
            }
        return answers

    def _look(self, way: Transport) -> Mapping[str, Any]:
        command, stdin = agent("glance", self._job)
        done = way.run(command, stdin=stdin, timeout=GLANCE_S)
        if done.rc == 127:
            raise TransportError(f"{way.name}: no python3 there; install it (apt install python3-minimal)")
        try:
            found = json.loads(done.text)
        except ValueError:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise TransportError(f"{way.name}: {said[-1][:200] if said else f'status {done.rc}'}") from None
        if not isinstance(found, dict):
            raise TransportError(f"{way.name}: not understood: {done.text[:100]}")
        return found
