"""NCCL's variables: profiles for a box without NVLink, and what a setting really does. Pure.

NCCL says nothing about most mistakes: a level in lower case is ignored, `true` is 0, a name with a typo is nobody's.
They are named here before a unit is written. Sources: NCCL 2.30's own code (src/misc/param.cc, src/graph/paths.cc and
tuning.cc); the profiles are what users of 4 to 16 RTX PRO 6000 boxes measured and published.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gpuctl.finding import Finding, Layer, Severity
from gpuctl.spelling import nearest


@dataclass(frozen=True)
class Profile:
    env: Mapping[str, str]
    reason: str
    source: str


PROFILES: Mapping[str, Profile] = {
    "none": Profile({}, "NCCL chooses by what it finds; right wherever nothing was measured", "NCCL's manual"),
    "latency": Profile(
        {"NCCL_P2P_LEVEL": "SYS", "NCCL_PROTO": "LL", "NCCL_MIN_NCHANNELS": "8"},
        "one or a few requests at once over PCIe: all-reduces are small, LL saves a synchronisation of each and costs "
        "half the bandwidth and more (over NVLink it saves nothing and costs 58 % of it)",
        "measured by the community on PCIe boxes (rtx6kpro, nccl-tuning); over NVLink: docs/gpu.md",
    ),
    "throughput": Profile(
        {
            "NCCL_P2P_DISABLE": "1",
            "NCCL_MIN_NCHANNELS": "16",
            "NCCL_MAX_NCHANNELS": "64",
            "NCCL_BUFFSIZE": "33554432",
        },
        "about a hundred requests at once: large all-reduces over PCIe went from 5,000 to 10,000 tok/s this way",
        "measured by the community on PCIe boxes (rtx6kpro, nccl-tuning)",
    ),
}

LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
LEVEL_OF = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL")  # variables that are read so (ncclGetLevel in paths.cc)
OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
PROTOCOLS = ("LL", "LL128", "Simple")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")

# Read with strtoll(value, NULL, 0): what does not begin with a number is 0, what follows one is dropped.
NUMERIC = frozenset("""
    ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_POINTERS CHUNK_SIZE COLLNET_ENABLE
    COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES
    CONNECT_ROUND_MAX_PEERS CROSS_NIC CUMEM_ENABLE CUMEM_HOST_ENABLE DEV_API_JIT DISABLE_MEM_MANAGER DMABUF_ENABLE
    ELASTIC_BUFFER_REGISTER ENABLE_VERSION_CHECK GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE
    GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE GIN_ENABLE GIN_ERROR_QUERY_SEC
    GIN_GDAKI_MAX_DEST_RD_ATOMIC GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_TC
    GIN_NCONNECTIONS GIN_PLUGIN_REF_COUNT GIN_PROXY_QUEUE_SIZE GIN_TYPE GRAPH_DUMP_FILE_RANK GRAPH_HELPER_DISABLE
    GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING GROUP_CUDA_STREAM IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD
    IB_DATA_DIRECT IB_DEVICE_PCI_ORDER IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_MERGE_NICS IB_MERGE_VFS
    IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ IB_PCI_RELAXED_ORDERING IB_PKEY
    IB_PREPOST_RECEIVE_WORK_REQUESTS IB_QPS_PER_CONNECTION IB_QUERY_PORT_SPEED IB_RECEIVER_SIDE_MATCHING_SCHEME
    IB_RESILIENCY_PORT_FAILOVER IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY
    IB_RESILIENCY_PORT_RECOVERY IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE
    IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT
    IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETRY_CNT
    IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_ROUTABLE_FLID_GID_INDEX IB_SL IB_SPLIT_DATA_ON_QPS
    IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_TC IB_TIMEOUT IB_USE_INLINE IB_WARN_RAIL_LOCAL
    IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET
    L1_SHARED_MEMORY_CARVEOUT LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_C2C
    LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER LSA_TEAM_SIZE MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS
    MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MLOPART_RDMA_ENABLE MNNVL_CLIQUE_ID
    MNNVL_CROSS_CLIQUE MNNVL_ENABLE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID MULTI_RANK_GPU_ENABLE
    MULTI_SEGMENT_REGISTER NCHANNELS_PER_NET_PEER NET_DISABLE_INTRA NET_FORCE_FLUSH NET_GDR_C2C NET_GDR_MLOPART
    NET_GDR_READ NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NET_PLUGIN_REF_COUNT NET_SHARED_BUFFERS NET_SHARED_COMMS
    NSOCKS_PERTHREAD NTHREADS NUM_RMA_CTX NVB_DISABLE NVB_PRECONNECT NVLINK_UTIL_CENTRIC_SCHED_ENABLE
    NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE P2P_DIRECT_DISABLE
    P2P_DISABLE P2P_EPOCH_ENABLE P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE
    P2P_PCI_CHUNKSIZE P2P_PER_CHANNEL_NET_BW P2P_PXN_LEVEL P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE
    P2P_USE_CUDA_MEMCPY PAT_ENABLE PROGRESS_APPENDOP_FREQ PROXY_APPEND_BATCH_SIZE PROXY_DUMP_SIGNAL PXN_C2C
    PXN_DISABLE RAS_ENABLE RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS RMA_DISABLE RMA_PLUGIN_REF_COUNT
    RMA_PROXY_DUMP_SIGNAL RMA_PROXY_QUEUE_SIZE RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE
    SHADOW_MEMPOOL_MAX_SIZE SHM_DISABLE SHM_LOCALITY SINGLE_PROC_MEM_REG_ENABLE SOCKET_INLINE SOCKET_MIN_TASKSIZE
    SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF
    SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_NOWIN_ENABLE SYM_REUSE_SYSMEM_HANDLES SYM_RS_GIN_CHUNK_SIZE
    SYM_TMA_ENABLE TOPO_DUMP_FILE_RANK TOPO_SPLIT_MLOPART UID_STAGGER_RATE UID_STAGGER_THRESHOLD
    UNPACK_DOUBLE_NCHANNELS WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
""".split())  # fmt: skip
TEXT = frozenset("""
    ALGO ASYNC_ERROR_HANDLING BLOCKING_WAIT CHECK_MODE COMM_ID CONF_FILE CTA_POLICY DEBUG DEBUG_FILE DEBUG_SUBSYS
    DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS ENV_PLUGIN GIN_CONNECTION_RAIL GIN_PLUGIN GRAPH_DUMP_FILE
    GRAPH_FILE HOSTID IBVERBS_LIB IB_ADDR_FAMILY IB_ADDR_RANGE IB_HCA LAUNCH_MODE NET NETDEVS_POLICY NET_FORCE_MERGE
    NET_GDR_LEVEL NET_MERGE_LEVEL NET_MERGE_POLICY NET_PLUGIN NO_CACHE OOB_NET_IFNAME P2P_LEVEL PARAM_DUMP_ALL
    PROFILER_PLUGIN PROTO PROXY_CPUSET RAS_ADDR RMA_PLUGIN SOCKET_FAMILY SOCKET_IFNAME SOCKET_MAGIC SYM_KERNEL
    THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_FILE TUNER_PLUGIN
""".split())  # fmt: skip


def environment(profile: str | None) -> dict[str, str]:
    """The variables of a profile; nothing for none. Raises KeyError."""
    return dict(PROFILES[profile].env) if profile else {}


def lint(env: Mapping[str, str], *, nvlink: bool | None = None) -> tuple[Finding, ...]:
    """What is wrong with the NCCL variables among these. `nvlink`: whether the GPUs have it; None is not known."""
    return tuple(_lint(env, nvlink))


def conf_values(text: str) -> dict[str, str]:
    """The variables an nccl.conf sets: of one that stands there twice the first counts, as in NCCL."""
    found: dict[str, str] = {}
    for _, name, equals, value in _conf_lines(text):
        if equals:
            found.setdefault(name, value)
    return found


def _conf_lines(text: str) -> Iterator[tuple[int, str, str, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.startswith("#") and line.strip():
            yield (number, *line.partition("="))


def lint_conf(text: str, file: str, env: Mapping[str, str] | None = None) -> tuple[Finding, ...]:
    """What is wrong with an nccl.conf for a server with these variables, which win over the file's.

    NCCL trims nothing: a space, or the carriage return of another system, becomes part of the name or of the value.
    """
    found = []
    for number, name, equals, value in _conf_lines(text):
        line = f"{name}{equals}{value}"
        if not equals:
            found.append(
                _finding(f"{file} line {number} has no `=` and is skipped: {line.strip()}", [line], "NAME=value")
            )
        elif name != name.strip() or value != value.strip():
            what = f"{file} line {number} sets a variable {name!r} to {value!r}: NCCL keeps the spaces"
            found.append(_finding(what, [line], f"{name.strip()}={value.strip()}"))
    own = dict(env or {})
    # a name or value with a space is named above
    whole = {name: value for name, value in conf_values(text).items() if (name + value).split() == [name + value]}
    without = lint(own)
    found += [replace(trap, summary=f"{file}: {trap.summary}") for trap in lint(whole | own) if trap not in without]
    return tuple(found)


def _finding(what: str, evidence: list[str], advice: str, severity: Severity = Severity.WARNING) -> Finding:
    return Finding(what, Layer.TUNING, severity, evidence=tuple(evidence), advice=advice, id="nccl_environment")


def _lint(env: Mapping[str, str], nvlink: bool | None) -> Iterator[Finding]:
    for name, value in sorted(env.items()):
        if not name.upper().startswith("NCCL_"):
            continue
        seen = [f"{name}={value}"]
        short = name.removeprefix("NCCL_")
        if name != name.upper():
            yield _finding(f"{name} is nobody's: NCCL reads names in capitals", seen, f"{name.upper()}={value}")
        elif short not in NUMERIC | TEXT and not short.startswith(("IB_", "NET_", "RAS_", "GIN_", "SYM_")):
            near = nearest(short, NUMERIC | TEXT)
            hint = f"did you mean NCCL_{near}?" if near else "see NCCL's manual"
            yield _finding(f"{name} is no variable of NCCL 2.30, and would be ignored without a word", seen, hint)
        elif short in NUMERIC and (problem := _number(value)):
            yield _finding(f"{name}={value} {problem}", seen, f"{name}=<number>, as 0, 1 or 0x10")
    for variable in LEVEL_OF:
        if (level := env.get(variable)) is not None:
            yield from _level(variable, level)
    if (off := env.get("NCCL_P2P_DISABLE", "").strip()) == "1" and "NCCL_P2P_LEVEL" in env:
        seen = [f"NCCL_P2P_LEVEL={env['NCCL_P2P_LEVEL']}", "NCCL_P2P_DISABLE=1"]
        yield _finding("NCCL_P2P_DISABLE=1 wins over NCCL_P2P_LEVEL", seen, "keep one of them")
    elif re.fullmatch(r"[2-9]|[1-9]\d+|-\d+", off):
        yield _finding(
            f"NCCL_P2P_DISABLE={off} disables nothing: only 1 does", [f"NCCL_P2P_DISABLE={off}"], "NCCL_P2P_DISABLE=1"
        )
    yield from _list("NCCL_PROTO", env.get("NCCL_PROTO"), PROTOCOLS)
    yield from _list("NCCL_ALGO", env.get("NCCL_ALGO"), ALGORITHMS)
    yield from _protocol(env.get("NCCL_PROTO"), nvlink)
    yield from _algorithm(env.get("NCCL_ALGO"), nvlink)
    low, high = (_value(env.get(f"NCCL_{side}_NCHANNELS")) for side in ("MIN", "MAX"))
    if low is not None and high is not None and low > high:
        seen = [f"NCCL_MIN_NCHANNELS={low}", f"NCCL_MAX_NCHANNELS={high}"]
        yield _finding("NCCL_MIN_NCHANNELS is above NCCL_MAX_NCHANNELS", seen, "swap them")


def _number(value: str) -> str | None:
    """What NCCL makes of a value that is no whole number; None where it is one, or empty (then the default holds)."""
    if not value or re.fullmatch(r"\s*[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*)", value):
        return None
    if re.match(r"\s*[+-]?0[89]", value):
        return "is read as octal, and is 0"
    begins = re.match(r"\s*([+-]?(?:0[xX][0-9a-fA-F]+|\d+))", value)
    return f"is read as {begins[1]}: NCCL knows no units" if begins else "is read as 0: NCCL knows numbers only"


def _value(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d+", text) else None


def _level(variable: str, level: str) -> Iterator[Finding]:
    seen = [f"{variable}={level}"]
    if level[:1].isdecimal():
        number = _value(level)
        means = OLD_LEVELS[min(number, 5)] if number is not None else "cut off at the first letter"
        yield _finding(f"{variable}={level} means {means}", seen, "write the name: " + " ".join(LEVELS), Severity.INFO)
    elif level not in LEVELS:
        right = f"{variable}={level.upper()}" if level.upper() in LEVELS else "one of " + " ".join(LEVELS)
        yield _finding(f"{variable}={level} is ignored: levels are compared letter by letter", seen, right)


def _entries(text: str) -> Iterator[tuple[str | None, bool, list[str]]]:
    """(function or None for all, is it a list of what is excluded, the names) for each part between semicolons."""
    for part in filter(None, text.split(";")):
        prefix, colon, names = part.partition(":")
        function, names = (prefix, names) if colon else (None, prefix)
        yield function, names.startswith("^"), [name for name in names.removeprefix("^").split(",") if name]


def _list(variable: str, text: str | None, known: tuple[str, ...]) -> Iterator[Finding]:
    """Names NCCL does not know end its initialisation (ncclInvalidUsage)."""
    if text is None:
        return
    lower = {name.lower() for name in known}
    for position, (function, _, names) in enumerate(_entries(text)):
        wrong = [name for name in names if name.lower() not in lower]
        if function is not None and function.lower() not in {f.lower() for f in FUNCTIONS}:
            wrong.append(function)
        if function is None and position > 0:
            wrong.append(f"{','.join(names)} (only the first part may stand without its function)")
        for name in wrong:
            yield _finding(
                f"{variable}={text}: NCCL does not know {name} and ends with ncclInvalidUsage",
                [f"{variable}={text}"],
                f"names: {', '.join(known)}; functions: {', '.join(FUNCTIONS)}",
                Severity.CRITICAL,
            )


def _protocol(text: str | None, nvlink: bool | None) -> Iterator[Finding]:
    # Excluding others names LL128 too: the list begins with everything set, and set is what NCCL takes for an order.
    if any(("ll128" in map(str.lower, names)) != excluded for _, excluded, names in _entries(text or "")) and (
        nvlink is not True
    ):
        yield _finding(
            f"NCCL_PROTO={text} forces LL128, which NCCL itself uses over NVLink only: elsewhere data may be corrupted",
            [
                f"NCCL_PROTO={text}",
                "GPUs without NVLink" if nvlink is False else "whether there is NVLink is not known",
            ],
            "NCCL_PROTO=LL for latency, or leave it to NCCL; to exclude another one: NCCL_PROTO=^Simple,LL128",
            Severity.CRITICAL if nvlink is False else Severity.WARNING,
        )


def _algorithm(text: str | None, nvlink: bool | None) -> Iterator[Finding]:
    """Broadcast and Reduce need Ring; AllGather and ReduceScatter one of Ring, PAT, NVLS, CollNetDirect (tuning.cc)."""
    if text is None:
        return
    everything = {name.lower() for name in ALGORITHMS}
    ok = dict.fromkeys(FUNCTIONS, everything)  # a function that is not named keeps all
    for function, excluded, names in _entries(text):
        chosen = {name.lower() for name in names} & everything
        for known in FUNCTIONS:
            if function is None or function.lower() == known.lower():
                ok[known] = everything - chosen if excluded else chosen
    needs = {
        "Broadcast": {"ring"},
        "Reduce": {"ring"},
        "AllGather": {"ring", "pat", "nvls", "collnetdirect"},
        "ReduceScatter": {"ring", "pat", "nvls", "collnetdirect"},
        "AllReduce": everything - {"pat"},
    }
    without = [function for function in FUNCTIONS if not ok[function] & needs[function]]
    if without:
        yield _finding(
            f"NCCL_ALGO={text} leaves {', '.join(without)} without an algorithm: NCCL ends when asked for one",
            [f"NCCL_ALGO={text}"],
            f"NCCL_ALGO=allreduce:{text} names it for all-reduces only; or add Ring",
            Severity.CRITICAL,
        )
    named = {name.lower() for _, excluded, names in _entries(text) if not excluded for name in names}
    if named & {"nvls", "nvlstree"} and nvlink is False:
        yield _finding(f"NCCL_ALGO={text}: NVLS needs NVSwitch", [f"NCCL_ALGO={text}"], "take it out")
