"""The table of `kvlease dev`."""

from collections.abc import Sequence

from kvlease.dev.check import TurnRow

_HEADINGS = ("turn", "path", "why", "reused/prompt", "TTFT ms", "READ bytes", "lease", "state", "equals cold")


def turn_table(turns: Sequence[TurnRow]) -> str:
    """One line per turn under a heading, in columns; what is wrong with a turn stands below the table."""
    rows = [_HEADINGS, *(_cells(number, turn) for number, turn in enumerate(turns, start=1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("─" * width for width in widths))
    wrong = [f"turn {number}: {turn.problem}" for number, turn in enumerate(turns, start=1) if turn.problem]
    return "\n".join([*lines, *wrong])


def _cells(number: int, turn: TurnRow) -> tuple[str, ...]:
    return (
        str(number),
        turn.path,
        turn.reason,
        f"{turn.reused_tokens}/{turn.prompt_tokens}",
        f"{turn.ttft_ms:.0f}",
        f"{turn.read_bytes:,}",
        turn.lease_id,
        turn.state,
        "yes" if turn.equals_cold else "NO",
    )
