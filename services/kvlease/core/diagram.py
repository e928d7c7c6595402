"""Draws the transition table: `python -m kvlease.core.diagram docs/protocol.md` redraws it in the page.

The page holds two marker lines; what lies between them is generated.
"""

import sys
from pathlib import Path

from kvlease.core.lease import ENDINGS, TERMINAL, TRANSITIONS, LeaseEvent, LeaseState

BEGIN = "<!-- generated from kvlease.core.lease.TRANSITIONS: begin -->"
END = "<!-- generated from kvlease.core.lease.TRANSITIONS: end -->"


def diagram() -> str:
    """A mermaid state diagram with one arrow per pair of states, ending in a newline."""
    arrows: dict[tuple[LeaseState, LeaseState], list[str]] = {}
    for (state, event), row in TRANSITIONS.items():
        if state in TERMINAL:
            continue
        targets = [row.target] if row.target is not None else _remembered_states()
        for target in targets:
            arrows.setdefault((state, target), []).append(event.value)
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [
        f"    {_name(state)} --> {_name(target)}: {', '.join(events)}"
        for (state, target), events in arrows.items()
    ]
    lines += [f"    {_name(state)} --> [*]" for state in LeaseState if state in TERMINAL]
    return "\n".join([*lines, "```"]) + "\n"


def table() -> str:
    """The same as a table in Markdown: a row per state, a column for what it accepts, ending in a newline."""
    lines = ["| state | accepts |", "|---|---|"]
    for state in LeaseState:
        accepted: dict[str, list[LeaseEvent]] = {}
        for (source, event), row in TRANSITIONS.items():
            if source is state:
                target = row.target.name if row.target is not None else "the state asked for"
                remembered = f" (then {row.remember.name})" if row.remember is not None else ""
                accepted.setdefault(target + remembered, []).append(event)
        cells = [
            f"{', '.join(event.value for event in events)} → {target}" for target, events in accepted.items()
        ]
        lines.append(f"| {state.name} | {' · '.join(cells)} |")
    return "\n".join(lines) + "\n"


def rewrite(page: str) -> str:
    """The page with the drawing between its markers replaced.

    Raises:
        ValueError: the page does not hold each marker once, in order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError("the page needs one begin marker and one end marker after it")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    return f"{head}{BEGIN}\n{diagram()}\n{table()}{END}{tail}"


def _name(state: LeaseState) -> str:
    return "[*]" if state is LeaseState.NONE else state.name


def _remembered_states() -> list[LeaseState]:
    """The states that a draining lease may remember."""
    return list(dict.fromkeys(ENDINGS.values()))


def main(arguments: list[str]) -> int:
    """Rewrites the page named in the arguments. Returns the exit status."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m kvlease.core.diagram PAGE\n")
        return 2
    page = Path(arguments[0])
    page.write_text(rewrite(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
