"""What the machine around the server says: the kernel, systemd, ports, disks. In a journal, or in the log itself."""

from __future__ import annotations

from gpuctl.finding import Certainty, Finding, Layer
from gpuctl.logs.rule import Hit, Story, rule, warning

_PORT = "Find who holds it: `ss -ltnp 'sport = :{port}'`; stop that process by its pid, or give another --port."


def _port(hit: Hit, story: Story) -> Finding:
    groups = hit.match.groupdict()
    port = groups.get("port") or story.flag("port") or "PORT"
    number = f" {port}" if port.isdigit() else ""
    hung = story.engine == "sglang" and hit.stage in ("capacity", "listening", "captured")
    return hit.rule.say(
        hit,
        summary=f"The port{number} is in use by another process"
        + ("; SGLang finds out only after loading, and then hangs with the GPU memory still held" if hung else ""),
        advice=("Stop this server too: it will not end by itself. " if hung else "") + _PORT.format(port=port),
    )


def _killed(hit: Hit, story: Story) -> Finding:
    size = hit.match.groupdict().get("rss")
    used = f", it held {int(size) / (1 << 20):.1f} GiB" if size else ""
    who = hit.match.groupdict().get("name") or ""
    limit = "the memory limit of its control group" if "emory cgroup" in hit.line.text else "the host's memory"
    return hit.rule.say(
        hit,
        summary=f"The kernel's OOM killer ended {who or 'the server'}{used}: {limit} was exhausted",
        advice="This is host memory, not GPU memory. A model in tmpfs counts as memory; so does each rank's copy "
        "while it loads. Stage less, load fewer ranks at once, raise MemoryMax= of the unit or the container, add "
        "swap.",
    )


def _storm(hit: Hit, story: Story) -> Finding | None:
    count = int(hit["count"])
    if count < 3:
        return None
    return hit.rule.say(
        hit,
        summary=f"systemd has restarted the server {count} times: it fails the same way each time, and each start "
        "loads the host with reading the model",
        advice="Stop it (`systemctl stop UNIT`), mend the cause, and set Restart=no (or StartLimitBurst=2).",
    )


RULES = (
    rule("host-out-of-memory", "ut of memory: Killed process",
         r"ut of memory: Killed process (?P<pid>\d+) \((?P<name>[^)]{1,40})\)(?:.{0,200}?anon-rss:(?P<rss>\d+)kB)?",
         specificity=98, explain=_killed),
    rule("host-out-of-memory", "oom-kill", r"Failed with result 'oom-kill'|result=oom-kill|oom-kill:constraint",
         specificity=95, explain=_killed),
    rule("host-out-of-memory", "killed by the OOM killer", r"A process of this unit has been killed by the OOM killer",
         specificity=94, explain=_killed),
    rule("port-in-use", "ddress already in use",
         r"bind on address \('[^']*', (?P<port>\d+)\)|(?:\[Errno 98\] )?[Aa]ddress already in "
         r"use(?:.{0,60}?:(?P<other>\d+))?", specificity=90, explain=_port),
    rule("port-in-use", "is not available in", r"\w+ at (?P<port>\d+) is not available in (?P<seconds>\d+) seconds",
         specificity=90, explain=_port),
    rule("port-in-use", "Port is already in use", r"Port is already in use", specificity=85, explain=_port),
    rule("port-in-use", "couldn't bind HTTP server socket", r"port: (?P<port>\d+)", specificity=90, explain=_port),
    rule("disk-full", "No space left on device", r"No space left on device", "A file system is full",
         "`df -h` on the server's machine: the caches of compiled kernels (~/.cache, /tmp), logs and /dev/shm are "
         "the usual places.", specificity=60, layer=Layer.CONTAINER),
    rule("numa-binding", "setting membind", r"setting membind: (?P<why>.{1,40})",
         "numactl may not bind memory here ({why}), so the server's processes end before Python starts",
         "In a container set SGLANG_NUMA_BIND_V2=0, or allow set_mempolicy (CAP_SYS_NICE) and the GPU's NUMA node "
         "(cpuset.mems).", specificity=92, layer=Layer.CONTAINER),
    rule("numa-binding", "set_mempolicy", r"set_mempolicy: (?P<why>(?:Invalid|Operation|Function).{1,40})",
         "numactl may not bind memory here ({why}), so the server's processes end before Python starts",
         "In a container set SGLANG_NUMA_BIND_V2=0, or allow set_mempolicy (CAP_SYS_NICE) and the GPU's NUMA node "
         "(cpuset.mems).", specificity=90, layer=Layer.CONTAINER),
    rule("crashed-native", "Segmentation fault", r"Segmentation fault",
         "The server crashed in native code (segmentation fault)",
         "The frames in the log below it say in which library; a kernel package that does not fit the installed "
         "torch is the usual cause.", specificity=45, certainty=Certainty.LIKELY),
    warning("restart-storm", "restart counter is at", r"restart counter is at (?P<count>\d+)", explain=_storm),
)  # fmt: skip
