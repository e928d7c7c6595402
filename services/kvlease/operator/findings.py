"""What `kvlease doctor` makes of a fleet. Pure: it judges what was found, and asks nobody."""

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from kvlease import __version__
from kvlease.core import details
from kvlease.core.records import Engine, EngineRole, HolderGauges

BLOCK_SIZE_ADVISED = 64
"""Below it a READ spends its time on posting descriptors, one per block, layer and half, not on bytes."""

QUARANTINED_SHARE_MAX = 0.1
ETCD_FULL_SHARE = 0.8
ETCD_QUOTA_DEFAULT = 2 << 30
"""What etcd has without `--quota-backend-bytes`; a server before 3.6 does not tell what it was given."""


class Verdict(Enum):
    """How good what was found is."""

    OK = "ok"
    ADVICE = "advice"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: its name, for scripts.
        subject: what it is about: an engine, a model, an address.
        text: what was found and, unless all is well, what to do.
    """

    check: str
    verdict: Verdict
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class EngineFindings:
    """What could be asked about one engine.

    Attributes:
        gauges: None when its connector does not answer.
        api_reached: its OpenAI API answers; None when that was not tried.
        side_channel_reached: its side channel takes connections; None when it does not tell where that is.
    """

    engine: Engine
    gauges: HolderGauges | None
    api_reached: bool | None = None
    side_channel_reached: bool | None = None

    @property
    def name(self) -> str:
        """How findings call it."""
        return f"{self.engine.role.value} {self.engine.holder.engine_id}"


@dataclass(frozen=True, slots=True)
class EtcdFindings:
    """What one member says of itself; an empty version: it does not answer, for `failure`."""

    endpoint: str
    version: str = ""
    bytes_used: int = 0
    bytes_quota: int = 0
    alarms: tuple[str, ...] = ()
    failure: str = ""


def judge_fleet(engines: Sequence[EngineFindings]) -> Iterator[Finding]:
    """Everything about the engines, alone and towards each other."""
    yield from _judge_roles(engines)
    for model in sorted({found.engine.model for found in engines}):
        same = [found for found in engines if found.engine.model == model]
        yield from _judge_drained(model, same)
        yield from _judge_layouts(model, same)
        yield from _judge_lengths(model, same)
        yield from _judge_backends(model, same)
    for found in engines:
        yield from _judge_engine(found)


# --- engines towards each other -------------------------------------------------------------------------------


def _judge_roles(engines: Sequence[EngineFindings]) -> Iterator[Finding]:
    counts = {role: sum(found.engine.role is role for found in engines) for role in EngineRole}
    if not counts[EngineRole.DECODE]:
        yield _problem("roles", "fleet", "no decode engine is registered: nobody can serve a turn")
    if not counts[EngineRole.PREFILL]:
        text = "no prefill engine is registered: decode engines compute every prompt themselves"
        yield Finding("roles", Verdict.ADVICE, "fleet", text)
    if all(counts.values()):
        text = f"{counts[EngineRole.PREFILL]} prefill and {counts[EngineRole.DECODE]} decode engines"
        yield _ok("roles", "fleet", text)
    versions = sorted({found.engine.vllm_version for found in engines})
    if len(versions) > 1:
        text = (
            f"engines run vLLM {', '.join(versions)}; those of different versions cannot hand KV over: upgrade "
            "prefill and decode engines together"
        )
        yield Finding("versions", Verdict.ADVICE, "fleet", text)
    elif versions:
        yield _ok("versions", "fleet", f"every engine runs vLLM {versions[0] or 'of an unknown version'}")


def _judge_drained(model: str, engines: Sequence[EngineFindings]) -> Iterator[Finding]:
    """An operator who drains the last engine of a role ends the work of all."""
    for role in EngineRole:
        draining = [found.engine.draining for found in engines if found.engine.role is role]
        if not draining or not all(draining):
            continue
        text = f"every {role.value} engine is draining ({len(draining)}): "
        if role is EngineRole.DECODE:
            yield _problem(
                "roles", model, f"{text}nobody can serve a turn until kvlease drain --undo, or another"
            )
        else:
            text += "decode engines compute every prompt themselves until kvlease drain --undo, or another"
            yield Finding("roles", Verdict.ADVICE, model, text)


def _judge_layouts(model: str, engines: Sequence[EngineFindings]) -> Iterator[Finding]:
    """A decode engine needs a prefill engine of its own layout, or every READ is refused."""
    prefill = [found.engine for found in engines if found.engine.role is EngineRole.PREFILL]
    decode = [found for found in engines if found.engine.role is EngineRole.DECODE]
    for found in decode if prefill else ():
        layout = found.engine.layout
        if any(other.layout.layout_hash == layout.layout_hash for other in prefill):
            yield _ok("layout", found.name, f"shares layout {layout.layout_hash} with a prefill engine")
        else:
            seen = "; ".join(_differences(found.engine, other) for other in prefill)
            yield _problem(
                "layout",
                found.name,
                f"no prefill engine of {model} has its layout {layout.layout_hash}, so nothing is handed over or "
                f"read back: {seen}",
            )


def _differences(engine: Engine, other: Engine) -> str:
    """What differs of what is known; the hash covers more (revision, quantization, overrides)."""
    mine, theirs = engine.layout, other.layout
    pairs = {
        "vLLM": (engine.vllm_version, other.vllm_version),
        "block_size": (mine.block_size, theirs.block_size),
        "dtype": (mine.dtype, theirs.dtype),
        "tensor_parallel_size": (mine.tensor_parallel_size, theirs.tensor_parallel_size),
        "pipeline_parallel_size": (mine.pipeline_parallel_size, theirs.pipeline_parallel_size),
        "block_bytes": (mine.block_bytes, theirs.block_bytes),
        "cache_dtype": tuple(one.details.get(details.CACHE_DTYPE) for one in (engine, other)),
    }
    seen = [f"{name} {own} and {its}" for name, (own, its) in pairs.items() if own != its]
    what = ", ".join(seen) or "revision, quantization or overrides differ"
    return f"{other.holder.engine_id}: {what}"


def _judge_lengths(model: str, engines: Sequence[EngineFindings]) -> Iterator[Finding]:
    """A prompt that one engine takes and another refuses fails in the middle of a turn."""
    told = {found.engine.details.get(details.MODEL_LENGTH_MAX, "") for found in engines} - {""}
    if len(told) > 1:
        lengths = ", ".join(sorted(told, key=int))
        text = f"engines take prompts of different lengths ({lengths}): give all of them the same --max-model-len"
        yield Finding("settings", Verdict.ADVICE, model, text)


def _judge_backends(model: str, engines: Sequence[EngineFindings]) -> Iterator[Finding]:
    told = {found.engine.details.get(details.NIXL_BACKENDS, "") for found in engines} - {""}
    if len(told) > 1:
        listed = " / ".join(sorted(told))
        yield _problem(
            "nixl_backend",
            model,
            f"engines have different NIXL backends ({listed}): give all of them the same",
        )


# --- one engine -----------------------------------------------------------------------------------------------


def _judge_engine(found: EngineFindings) -> Iterator[Finding]:
    engine, gauges = found.engine, found.gauges
    if gauges is None:
        text = f"its connector does not answer the sidecar at {engine.sidecar_address}"
        yield _problem("connector", found.name, text)
    else:
        yield _ok("connector", found.name, f"{gauges.held_blocks} of {gauges.total_blocks} blocks are held")
        yield from _judge_quarantine(found.name, gauges)
    if not engine.retain:
        yield _problem("retention", found.name, f"keeps and reads no leases: {engine.retain_refusal}")
    if not engine.prefix_caching:
        text = (
            "prefix caching is off: neither append nor readback finds what is in the cache; do not disable it"
        )
        yield _problem("prefix_caching", found.name, text)
    if engine.draining:
        yield Finding("draining", Verdict.ADVICE, found.name, "gets no new turns until kvlease drain --undo")
    if found.api_reached is False:
        yield _problem("api", found.name, f"{engine.url} does not answer from here")
    yield from _tell_settings(found)
    yield from _judge_connector_version(found)
    yield from _judge_side_channel(found)
    yield from _judge_backend(found)
    yield from _judge_block_size(found)


def _tell_settings(found: EngineFindings) -> Iterator[Finding]:
    """The settings of its cache, which no other engine has to share."""
    engine, told = found.engine, found.engine.details
    gib = engine.total_blocks * engine.layout.block_bytes / (1 << 30)
    parts = [
        f"{engine.total_blocks} blocks of {engine.layout.block_size} tokens ({gib:.1f} GiB)",
        f"cache dtype {told[details.CACHE_DTYPE]}" if details.CACHE_DTYPE in told else "",
        f"{told[details.RETENTION_BUDGET]} of them for leases" if details.RETENTION_BUDGET in told else "",
        f"{told[details.READING_CAP]} pinned at most" if details.READING_CAP in told else "",
        f"{told[details.SEQUENCES_MAX]} sequences" if details.SEQUENCES_MAX in told else "",
    ]
    yield _ok("settings", found.name, ", ".join(part for part in parts if part))


def _judge_quarantine(name: str, gauges: HolderGauges) -> Iterator[Finding]:
    if gauges.quarantined_blocks > QUARANTINED_SHARE_MAX * max(1, gauges.total_blocks):
        text = (
            f"{gauges.quarantined_blocks} of {gauges.total_blocks} blocks are quarantined: READs from a holder do "
            "not end; look at the network between them"
        )
        yield _problem("quarantine", name, text)


def _judge_connector_version(found: EngineFindings) -> Iterator[Finding]:
    version = found.engine.details.get(details.CONNECTOR_VERSION)
    if version is not None and version != __version__:
        text = f"runs the connector of kvlease {version}, this is {__version__}: finish the upgrade"
        yield Finding("versions", Verdict.ADVICE, found.name, text)


def _judge_side_channel(found: EngineFindings) -> Iterator[Finding]:
    location = found.engine.location
    if location is None:
        return
    address = f"{location.side_channel_host}:{location.side_channel_port}"
    elsewhere = not _is_loopback(found.engine.sidecar_address.rpartition(":")[0])
    if elsewhere and _is_loopback(location.side_channel_host):
        text = f"its side channel is at {address}, which no other machine reaches: set VLLM_NIXL_SIDE_CHANNEL_HOST"
        yield _problem("side_channel", found.name, text)
    elif found.side_channel_reached:
        yield _ok("side_channel", found.name, f"{address} takes connections")
    else:
        yield _problem("side_channel", found.name, f"{address} takes no connection from here")


def _judge_backend(found: EngineFindings) -> Iterator[Finding]:
    """LIBFABRIC without an RDMA device works over sockets, slowly and in silence."""
    backends = found.engine.details.get(details.NIXL_BACKENDS)
    if not backends:
        return
    handles = found.gauges.counters.get(details.FABRIC_HANDLES) if found.gauges is not None else None
    if "LIBFABRIC" not in backends.split(",") or handles is None:
        yield _ok("nixl_backend", found.name, f"NIXL uses {backends}")
    elif handles:
        yield _ok(
            "nixl_backend",
            found.name,
            f"LIBFABRIC has {handles} RDMA devices open: the efa provider is in use",
        )
    else:
        text = (
            "LIBFABRIC has no RDMA device open, so KV moves over sockets: give the engine its EFA devices, and "
            "FI_PROVIDER=efa so that it fails instead"
        )
        yield _problem("nixl_backend", found.name, text)


def _judge_block_size(found: EngineFindings) -> Iterator[Finding]:
    size, device = found.engine.layout.block_size, found.engine.details.get(details.DEVICE)
    if device == "cuda" and size < BLOCK_SIZE_ADVISED:
        text = (
            f"block size {size}: the number of descriptors bounds a READ, so --block-size 128 is several times "
            "faster; a lease ends at a block's end, which wastes up to a block per turn"
        )
        yield Finding("block_size", Verdict.ADVICE, found.name, text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# --- registry and etcd ----------------------------------------------------------------------------------------


def judge_store(registry: str, failure: str) -> Finding:
    """A registry that answers, and whose store does not; `failure` is what it says of it."""
    text = (
        f"the registry answers, its store does not ({failure}): no engine could be looked at. Turns go on with "
        "the engines that are known; bring etcd back, and look at it with --etcd"
    )
    return _problem("store", f"registry {registry}", text)


def judge_etcd(found: EtcdFindings, version_min: tuple[int, ...]) -> Iterator[Finding]:
    """Version, alarms and room of one member."""
    name = f"etcd {found.endpoint}"
    if not found.version:
        yield _problem("etcd", name, f"does not answer: {found.failure}")
        return
    least = ".".join(map(str, version_min))
    if _version_parts(found.version) < version_min:
        # Services refuse it by themselves: whoever sees this told them not to, and risks reuse, no answer.
        text = (
            f"version {found.version}: before {least} a renewal can succeed for a revoked lease, so that engines "
            "seem registered which are not; it is accepted only with --etcd-accept-old, as kvlease dev does: "
            "upgrade it for production"
        )
        yield Finding("etcd_version", Verdict.ADVICE, name, text)
    else:
        yield _ok("etcd_version", name, f"version {found.version}")
    for alarm in found.alarms:
        yield _problem("etcd_alarm", name, f"{alarm}; see docs/operations.md")
    quota = found.bytes_quota or ETCD_QUOTA_DEFAULT
    told = "" if found.bytes_quota else " (its default: this version does not tell)"
    text = f"{found.bytes_used:,} of {quota:,} bytes{told} are used"
    if found.bytes_used > ETCD_FULL_SHARE * quota:
        yield _problem("etcd_quota", name, f"{text}: compact and defragment it, or raise its quota")
    else:
        yield _ok("etcd_quota", name, text)


def _version_parts(version: str) -> tuple[int, ...]:
    numbers = version.partition("-")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())


def _ok(check: str, subject: str, text: str) -> Finding:
    return Finding(check, Verdict.OK, subject, text)


def _problem(check: str, subject: str, text: str) -> Finding:
    return Finding(check, Verdict.PROBLEM, subject, text)
