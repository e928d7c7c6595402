"""`kvlease leases`: the recorded leases of the fleet: list, get, watch, release."""

import json
import sys
from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime

from kvlease.core.errors import HolderUnreachable
from kvlease.core.ids import lease_id_to_hex
from kvlease.core.lease import MissReason
from kvlease.core.records import LeaseRecord
from kvlease.operator.command import Exit, Output, Row, not_found, perform, show
from kvlease.operator.connection import fleet
from kvlease.operator.flags import add_common_flags, add_registry_flag, count, lease_id
from kvlease.operator.rows import lease_row
from kvlease.store.port import Batch

COLUMNS = ("lease_id", "kind", "state", "engine_id", "tokens", "exclusive_bytes", "tenant", "model")
FINAL_MISSES = frozenset({MissReason.RELEASED, MissReason.EXPIRED, MissReason.EVICTED, MissReason.LOST})
"""What a lease may have been already when it is released: the aim is reached."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the verbs and flags of `kvlease leases`."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list|get|watch|release")
    listing = verbs.add_parser("list", help="every recorded lease")
    listing.add_argument("--engine", default="", metavar="ENGINE_ID", help="only those that it holds")
    listing.add_argument("--tenant", default="", metavar="DIGEST", help="only those of this tenant")
    getting = verbs.add_parser("get", help="one lease")
    watching = verbs.add_parser("watch", help="what is recorded and removed, as it happens, until Ctrl-C")
    watching.add_argument("--count", type=count, metavar="N", help="end after N changes")
    releasing = verbs.add_parser("release", help="end leases at their holders; a READ in flight ends first")
    releasing.add_argument(
        "--engine", default="", metavar="ENGINE_ID", help="where to look for leases that are not recorded"
    )
    getting.add_argument("lease_id", type=lease_id, metavar="LEASE_ID", help="16 hex digits")
    releasing.add_argument("lease_id", type=lease_id, nargs="+", metavar="LEASE_ID", help="16 hex digits")
    for verb in (listing, getting, watching, releasing):
        add_registry_flag(verb)
        add_common_flags(verb)
    parser.epilog = (
        "Exit status: 0, 1 a lease or an engine that was named is not there, 2 usage, 3 the registry does not "
        "answer."
    )


def run(arguments: Namespace) -> int:
    """Performs one verb. The exit status: 1 when a lease, or an engine that was named, is not there."""
    verbs = {"list": _list, "get": _get, "watch": _watch, "release": _release}
    return perform(f"leases {arguments.verb}", verbs[arguments.verb], arguments)


async def _list(arguments: Namespace) -> int:
    async with fleet(arguments) as ways:
        registry = await ways.registry(arguments.registry)
        leases = await registry.list_leases(arguments.engine, arguments.tenant)
        if arguments.engine and not leases:
            await registry.find_engine(arguments.engine)
    show([lease_row(lease) for lease in leases], COLUMNS, arguments.output)
    return Exit.OK


async def _get(arguments: Namespace) -> int:
    async with fleet(arguments) as ways:
        registry = await ways.registry(arguments.registry)
        found = await registry.get_lease(arguments.lease_id)
    if isinstance(found, MissReason):
        name = lease_id_to_hex(arguments.lease_id)
        raise not_found(f"lease {name} is not recorded: it was never confirmed, or has ended")
    show([lease_row(found)], COLUMNS, arguments.output)
    return Exit.OK


async def _watch(arguments: Namespace) -> int:
    left = arguments.count or -1
    async with fleet(arguments) as ways:
        registry = await ways.registry(arguments.registry)
        async with registry.watch_leases() as batches:
            async for batch in batches:
                for row in _change_rows(batch):
                    _print_change(row, arguments.output)
                    left -= 1
                    if left == 0:
                        return Exit.OK
    raise HolderUnreachable(f"the registry at {arguments.registry} ended the watch")


def _change_rows(batch: Batch[LeaseRecord]) -> list[Row]:
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    rows: list[Row] = []
    for change in batch.changes:
        what = "gone" if change.gone else ("there" if batch.snapshot else "recorded")
        rows.append({"time": time, "change": what, **lease_row(change.item)})
    return rows


def _print_change(row: Row, output: Output) -> None:
    if output is Output.JSON:
        print(json.dumps(row))
    else:
        shown = ("time", "change", "lease_id", "engine_id", "tokens")
        print("  ".join(str(row[key]) for key in shown))
    sys.stdout.flush()


async def _release(arguments: Namespace) -> int:
    rows: list[Row] = []
    async with fleet(arguments) as ways:
        registry = await ways.registry(arguments.registry)
        if arguments.engine:
            await registry.find_engine(arguments.engine)
        for each in arguments.lease_id:
            miss = await registry.release(each, arguments.engine)
            result = "released" if miss is None else miss.value
            rows.append({"lease_id": lease_id_to_hex(each), "result": result, "ended": _is_over(miss)})
    show(rows, ("lease_id", "result"), arguments.output)
    return Exit.OK if all(row["ended"] for row in rows) else Exit.PROBLEM


def _is_over(miss: MissReason | None) -> bool:
    return miss is None or miss in FINAL_MISSES
