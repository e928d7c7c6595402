"""What live requests will need next."""

from dataclasses import dataclass
from typing import Any

from kvlease_vllm.room import Room


@dataclass
class FakeRequest:
    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens


def test_running_requests_need_a_block_each_and_the_first_waiting_one_all_of_its() -> None:
    room = Room(4)
    for number in range(3):
        request: Any = FakeRequest(f"w{number}", 15 + number)
        room.arrived(request)
    assert room.needed({"x": 1, "y": 1}) == 2 + 4
    room.gone("w0")
    assert room.needed({}) == 5


def test_a_begun_prompt_needs_what_it_lacks_until_it_is_computed() -> None:
    room = Room(4)
    request: Any = FakeRequest("a", 40)
    room.arrived(request)
    room.admitted(request)
    assert room.needed({"a": 16}) == 1 + 11 - 4
    request.num_computed_tokens = 16
    assert room.needed({}) == 11 - 4
    assert room.needed({"a": 24}) == 1
    request.num_computed_tokens = 41
    assert room.needed({"a": 1}) == 1


def test_what_vllm_keeps_free_counts_while_a_request_waits_or_is_begun() -> None:
    room = Room(4, ahead_tokens=5, spare_blocks=7)
    request: Any = FakeRequest("a", 15)
    assert room.needed({"x": 1}) == 1
    assert room.to_admit(request, computed_tokens=8) == 4 + 2 - 2 + 7
    room.arrived(request)
    assert room.needed({"x": 1}) == 1 + 4 + 2 + 7
    room.admitted(request)
    assert room.needed({"x": 1}) == 1 + 4 + 2 + 7
    request.num_computed_tokens = 15
    assert room.needed({"x": 1}) == 1
