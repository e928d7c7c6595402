"""The places of vLLM that the connector stands on, checked before the engine serves.

vLLM's connector API is experimental. Rather than trusting a version number, the connector looks at the
signatures it uses and refuses to start when one differs; `VERIFIED` names the versions whose behaviour was shown
by tests.
"""

import inspect
from collections.abc import Callable
from typing import Any

VERIFIED = ("0.26", "0.32")

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    "update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("self", "scheduler_output"),
    "on_new_request": ("self", "request"),
    "update_connector_output": ("self", "connector_output"),
    "request_finished_all_groups": ("self", "request", "block_ids"),
    "bind_gpu_block_pool": ("self", "gpu_block_pool"),
    "build_connector_worker_meta": ("self",),
    "get_finished": ("self", "finished_req_ids"),
    "get_block_ids_with_load_errors": ("self",),
    "start_load_kv": ("self", "forward_context", "kwargs"),
    "take_events": ("self",),
}

_POOL_PARAMETERS: dict[str, tuple[str, ...]] = {
    "touch": ("self", "blocks"),
    "free_blocks": ("self", "ordered_blocks"),
    "reset_prefix_cache": ("self",),
    "get_num_free_blocks": ("self",),
}

_HANDSHAKE_PARAMETERS = ("engine_id", "host", "port", "tp_size")

_WORKER_ATTRIBUTES = (
    "_recving_metadata",
    "_recving_transfers",
    "_failed_recv_reqs",
    "_remote_agents",
    "_cleanup_remote_engine",
    "_read_blocks_for_req",
    "nixl_wrapper",
)


class UnsupportedEngineError(RuntimeError):
    """This vLLM differs from what the connector was written for; nothing was started."""


def check_connector(connector_class: type, pool_class: type, version: str) -> None:
    """Compares the signatures in use with those the connector was written for.

    Raises:
        UnsupportedEngineError: one differs or is missing; the message lists all of them.
    """
    differences = [
        *_differences(connector_class, _PARAMETERS),
        *_differences(pool_class, _POOL_PARAMETERS),
    ]
    if differences:
        raise UnsupportedEngineError(
            f"kvlease cannot run in vLLM {version}: {'; '.join(differences)}. "
            f"Versions shown to work: {', '.join(VERIFIED)}"
        )


def check_worker(worker: object, version: str) -> None:
    """Looks for the attributes of vLLM's NIXL worker that quarantine needs.

    Raises:
        UnsupportedEngineError: one is missing.
    """
    missing = [name for name in _WORKER_ATTRIBUTES if not hasattr(worker, name)]
    if missing:
        raise UnsupportedEngineError(
            f"kvlease cannot run in vLLM {version}: its NIXL worker has no {', '.join(missing)}. "
            f"Versions shown to work: {', '.join(VERIFIED)}"
        )


def check_alone(version: str) -> None:
    """Refuses vLLM's connector of several with ours among them, where vLLM tells: in its workers, before it serves.

    There nobody heeds what the connector says of roles and of failed loads, and a request that was preempted and is
    being loaded by another connector counts as computed when it is aborted.

    Raises:
        UnsupportedEngineError: the engine's connector is not ours.
    """
    import vllm.config

    current = getattr(vllm.config, "get_current_vllm_config_or_none", lambda: None)()
    transfer = current.kv_transfer_config if current is not None else None
    if transfer is not None and transfer.kv_connector == "MultiConnector":
        raise UnsupportedEngineError(
            f"kvlease cannot run in vLLM {version} inside MultiConnector: beside other connectors it could retain or "
            "use KV that is half loaded. Name KvleaseConnector as kv_connector itself"
        )


def has_background_handshake(worker: object) -> bool:
    """Whether this version of vLLM can shake hands without a request that waits for it.

    Where it cannot, the first READ does it.
    """
    ensure = getattr(worker, "_ensure_handshake", None)
    if ensure is None:
        return False
    return tuple(inspect.signature(ensure).parameters)[:4] == _HANDSHAKE_PARAMETERS


def _differences(owner: type, expected: dict[str, tuple[str, ...]]) -> list[str]:
    found: list[str] = []
    for name, parameters in expected.items():
        method: Callable[..., Any] | None = getattr(owner, name, None)
        if method is None:
            found.append(f"{owner.__name__}.{name} is missing")
            continue
        actual = tuple(inspect.signature(method).parameters)
        if actual != parameters:
            found.append(f"{owner.__name__}.{name} takes {actual}, not {parameters}")
    return found
