"""The drawing in the protocol's page is the table that runs."""

from pathlib import Path

import pytest

from kvlease.core.diagram import BEGIN, END, diagram, main, rewrite, table
from kvlease.core.lease import TERMINAL, TRANSITIONS, LeaseState

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_page_holds_what_is_generated_from_the_table() -> None:
    page = PAGE.read_text()
    assert rewrite(page) == page


def test_every_row_that_leaves_a_state_is_an_arrow() -> None:
    drawn = diagram()
    for (state, event), row in TRANSITIONS.items():
        if state in TERMINAL or row.target is None:
            continue
        source = "[*]" if state is LeaseState.NONE else state.name
        arrows = [
            line for line in drawn.splitlines() if line.startswith(f"    {source} --> {row.target.name}:")
        ]
        assert len(arrows) == 1
        assert event.value in arrows[0]


def test_every_state_has_a_line_in_the_table() -> None:
    assert [line.split(" | ")[0] for line in table().splitlines()[2:]] == [f"| {s.name}" for s in LeaseState]


@pytest.mark.parametrize("page", ["", BEGIN, END + BEGIN, BEGIN + END + END])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="marker"):
        rewrite(page)


def test_the_command_replaces_an_old_drawing_and_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"head\n{BEGIN}\nold\n{END}\ntail\n")
    assert main([str(page)]) == 0
    text = page.read_text()
    assert text.startswith("head\n")
    assert text.endswith("\ntail\n")
    assert "old" not in text
    assert diagram() in text
    assert main([]) == 2
