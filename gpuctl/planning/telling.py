"""A plan in words and as a picture of one GPU's memory, for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpuctl.memory import Term, Verdict, at_once, size
from gpuctl.planning.servers import ServerPlan, Space

# Letter, colour and words of each part of the memory, in the order in which they are drawn.
PARTS: dict[str, tuple[str, str, str]] = {
    "held": ("h", "white", "held by others"),
    "context": ("·", "white", "not available"),
    "weights": ("W", "blue", "weights"),
    "drafter": ("D", "cyan", "drafter"),
    "states": ("S", "magenta", "recurrent states"),
    "verify": ("V", "red", "verify buffers"),
    "kv": ("K", "green", "KV cache"),
    "table": ("t", "green", "request table"),
    "graphs": ("G", "yellow", "CUDA graphs"),
    "activations": ("A", "yellow", "a step"),
    "free": (" ", "", "left"),
}
Paint = Callable[[str, str], str]  # (text, colour) -> text


def plain(text: str, _colour: str) -> str:
    return text


def bar(terms: Sequence[Term], total: int, width: int, paint: Paint = plain) -> str:
    """The memory of one GPU as `width` letters. A part that is there has at least one; what exceeds is cut off."""
    parts: list[tuple[str, int]] = []
    for name in PARTS:
        taken = sum(max(term.bytes, 0) for term in terms if term.name == name)
        if taken and name not in ("free", "table"):
            parts.append((name, taken))
    columns = [max(1, round(taken / total * width)) if taken > total / width / 8 else 0 for _, taken in parts]
    while sum(columns) > width and max(columns) > 1:
        columns[columns.index(max(columns))] -= 1
    drawn = "".join(
        paint(PARTS[name][0] * count, PARTS[name][1]) for (name, _), count in zip(parts, columns, strict=True) if count
    )
    return drawn + " " * (width - sum(columns))


def legend(servers: Sequence[ServerPlan], paint: Paint = plain) -> str:
    used = {term.name for server in servers for term in server.plan.terms if term.bytes > 0}
    return "  ".join(
        f"{paint(letter, colour)} {words}"
        for name, (letter, colour, words) in PARTS.items()
        if name in used and name not in ("free", "table")
    )


WORDS = {
    Verdict.FITS: ("fits", "green"),
    Verdict.LIMITED: ("limited", "yellow"),
    Verdict.IMPOSSIBLE: ("CANNOT", "red"),
    Verdict.UNKNOWN: ("unknown", "white"),
}


@dataclass(frozen=True)
class PhaseTold:
    """What there is to tell of a phase, beside its servers."""

    name: str
    title: str
    machine: str
    basis: str
    servers: tuple[ServerPlan, ...]
    spaces: tuple[Space, ...]
    warnings: tuple[str, ...] = ()
    sure: bool = True  # what is pending was told by the machine as it is now


def of_phase(told: PhaseTold, paint: Paint = plain, width: int = 44) -> Iterator[str]:
    """The phase: a bar a server, what is wrong and what to change, cells, time, space."""
    yield f"{told.name}: {told.title}, on {told.machine}"
    yield f"  {told.basis}"
    drawn = [server for server in told.servers if server.gpu is not None and server.plan.terms]
    long = max((len(server.name) for server in told.servers), default=0)
    for heading in _headings(drawn):
        yield f"  {heading}"
    yield ""
    for server in told.servers:
        word, colour = WORDS[server.verdict]
        picture = " " * width
        if server in drawn and server.gpu is not None:
            picture = bar(server.plan.terms, server.gpu.total_bytes, width, paint)
        numbers = ""
        if server.verdict in (Verdict.FITS, Verdict.LIMITED):
            numbers = f"{server.plan.requests} at once, {server.plan.kv_tokens or 0:,} tokens"
        yield f"  {server.name:<{long}}  |{picture}|  {paint(f'{word:<7}', colour)}  {numbers}".rstrip()
    if drawn:
        yield f"  {'':<{long}}   {legend(drawn, paint)}"
    same: dict[tuple[str, ...], list[str]] = {}
    for server in told.servers:
        if lines := tuple(_troubles(server)):
            same.setdefault(lines, []).append(server.name)
    for lines, names in same.items():
        yield ""
        yield f"  {', '.join(names)}"
        yield from lines
    for warning in told.warnings:
        yield f"  warning: {warning}"
    yield ""
    yield from _cells(told)
    yield from _time(told.servers)
    yield from _space(told.spaces)


def _headings(drawn: Sequence[ServerPlan]) -> Iterator[str]:
    """What the bars show, and by which rules; once for all servers that have it in common."""
    seen: dict[str, None] = {}
    for server in drawn:
        assert server.gpu is not None
        where = f"one GPU: {server.gpu.name}, {size(server.gpu.total_bytes)}" if server.gpu.name != _MEMORY else (
            f"{_MEMORY}: {size(server.gpu.total_bytes)}")  # fmt: skip
        seen[where] = None
    for server in drawn:
        seen[f"rules: {server.plan.rules}"] = None
    for server in drawn:
        if server.flags_from:
            seen[f"flags: checked against {server.flags_from}"] = None
            break
    else:
        seen["flags: checked by the rules known of the engine; its installed version was not asked"] = None
    yield from seen


_MEMORY = "the machine's memory"


def _troubles(server: ServerPlan) -> Iterator[str]:
    plan = server.plan
    lines = []
    if plan.verdict is not Verdict.FITS:
        lines.append(f"    {plan.summary}")
        if plan.message:
            lines.append(f"    the engine would say: {plan.message}")
        if plan.change is not None:
            lines.append(f"    change: {plan.change}")
    for finding in plan.findings:
        if finding.summary != plan.summary and finding.severity.value != "info":
            lines.append(f"    {finding.severity.value}: {finding.summary}")
            lines.append(f"      {finding.advice}")
    lines += [
        f"    {cell.cell.workload}/{cell.cell.point}: {cell.outcome}: {cell.why}"
        for cell in server.cells
        if cell.outcome in ("limited", "refused")
    ]
    yield from lines


def _cells(told: PhaseTold) -> Iterator[str]:
    cells = [cell for server in told.servers for cell in server.cells]
    if not cells:
        return
    reasons: dict[str, int] = {}
    for cell in cells:
        if cell.pending is not False:
            why = cell.pending_why or "whether they were measured is not known"
            reasons[why] = reasons.get(why, 0) + 1
    pending = sum(reasons.values())
    line = f"  cells    {len(cells)}, {pending} pending"
    if len(reasons) == 1:
        line += f" ({next(iter(reasons))})"
    yield line
    if len(reasons) > 1:
        for why, count in sorted(reasons.items(), key=lambda item: -item[1])[:6]:
            yield f"           {count}: {why}"
    if not told.sure and any(cell.pending is False for cell in cells):
        yield "           what was measured is kept if the machine is as it was: that is not known without it"


def _time(servers: Sequence[ServerPlan]) -> Iterator[str]:
    servers = [server for server in servers if server.verdict is not Verdict.IMPOSSIBLE]
    if not servers:
        return  # what cannot be started takes no time, and is not done either
    known = [server for server in servers if server.seconds is not None]
    if not known:
        if servers:
            yield "  time     not known: no earlier run, and the bandwidth of this memory is not known"
        return
    whole = sum(server.seconds or 0.0 for server in known)
    if not whole:
        yield "  time     nothing is left to do"
        return
    left = [c for server in known for c in server.cells if c.pending is not False and c.seconds]
    measured = sum(cell.seconds_from == "an earlier run" for cell in left)
    basis = []
    if measured:
        basis.append(f"{measured} cells as long as they took before")
    if measured < len(left):
        basis.append(
            f"{len(left) - measured} by the roofline; less under speculation that accepts"
            if any("--speculative" in " ".join(server.argv) for server in known)
            else f"{len(left) - measured} by the roofline"
        )
    starts = sum(server.start_s or 0.0 for server in known if server.seconds)
    unknown = (
        f"; without {len(servers) - len(known)} servers of which it is not known" if len(known) < len(servers) else ""
    )
    yield f"  time     about {duration(whole)}, of it {duration(starts)} starting ({'; '.join(basis)}{unknown})"


def _space(spaces: Sequence[Space]) -> Iterator[str]:
    first = True
    for space in spaces:
        if space.there and not space.problem:
            continue
        needed = size(space.bytes) if space.bytes is not None else "an unknown size"
        there = "" if space.there is None else ", not there yet"
        yield f"  {'space' if first else '':<8} {space.model}: {needed} of {space.kind} at {space.path}{there}"
        first = False
        if space.problem:
            yield f"           {space.problem}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def of_server(
    server: ServerPlan, basis: str, spaces: Sequence[Space], paint: Paint = plain, width: int = 76
) -> Iterator[str]:
    """One server at length: the picture, each part with its arithmetic, what fits, what to change, its speed."""
    plan = server.plan
    word, colour = WORDS[server.verdict]
    yield f"{server.name}: {server.title}: {paint(word, colour)}"
    yield f"  {plan.summary}"
    if plan.message:
        yield f"  the engine would say: {plan.message}"
    if plan.change is not None:
        yield f"  change: {plan.change}"
    yield f"  {basis}"
    for heading in _headings([server] if server.gpu is not None and plan.terms else []):
        yield f"  {heading}"
    if server.gpu is not None and plan.terms:
        yield ""
        yield f"  |{bar(plan.terms, server.gpu.total_bytes, width, paint)}|"
        for term in plan.terms:
            letter, tint, _ = PARTS.get(term.name, ("?", "white", ""))
            share = term.bytes / server.gpu.total_bytes
            how = f"  {term.how}" if term.how else ""
            yield f"   {paint(letter, tint)} {term.title:<28} {size(term.bytes):>11} {share:>6.1%}{how}".rstrip()
    numbers = []
    if plan.kv_tokens is not None and plan.verdict is not Verdict.IMPOSSIBLE:
        numbers.append(f"{plan.kv_tokens:,} tokens of KV cache")
    if plan.state_slots is not None:
        numbers.append(f"{plan.state_slots:,} state slots")
    if plan.requests is not None and plan.verdict is not Verdict.IMPOSSIBLE:
        numbers.append(at_once(plan.requests))
    if plan.context is not None:
        numbers.append(f"a window of {plan.context:,} tokens")
    if numbers:
        yield ""
        yield f"  holds    {', '.join(numbers)}; the limit: {_LIMITS.get(plan.limit, plan.limit)}"
    if plan.verdict is not Verdict.IMPOSSIBLE:
        for fit in plan.fits:
            ends = (
                "is refused: longer than the window"
                if fit.limit == "window"
                else f"{fit.requests} at once ({fit.limit})"
            )
            yield f"           of {fit.context:,} tokens: {ends}"
    best = max((cell.roofline_tok_s or 0.0 for cell in server.cells if cell.concurrency == 1), default=0.0)
    if best:
        yield f"  speed    at most {best:.1f} tok/s a request, times the tokens accepted a step ({server.speed})"
    for finding in plan.findings:
        if finding.summary != plan.summary:
            yield f"  {finding.severity.value}: {finding.summary}"
            yield f"    {finding.advice}"
    for note in plan.notes:
        yield f"  note     {note}"
    wrong = [cell for cell in server.cells if cell.outcome in ("limited", "refused")]
    for cell in wrong:
        yield f"  {cell.cell.phase}/{cell.cell.workload}/{cell.cell.point}: {cell.outcome}: {cell.why}"
    yield from _time([server] if server.cells else [])
    yield from _space(spaces)


_LIMITS = {"kv": "KV cache", "states": "recurrent states", "requests": "what is asked for", "verify": "verify buffers"}
