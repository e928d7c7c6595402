"""What a chain of digests proves, as properties over random prompts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.digests import DIGEST_BYTES, ChainRoot, chain, common_full_blocks, verified_tokens

ROOT = ChainRoot(
    tenant="tenant", model="model", weights_version="1", lora_name="l", lora_path="/l", cache_salt="salt"
)
BLOCK_SIZES = st.integers(1, 5)
TOKENS = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=24)


def common_tokens(left: list[int], right: list[int]) -> int:
    length = 0
    for mine, other in zip(left, right, strict=False):
        if mine != other:
            break
        length += 1
    return length


@given(head=TOKENS, left=TOKENS, right=TOKENS, block_size=BLOCK_SIZES)
def test_the_common_prefix_of_two_chains_is_that_of_their_tokens(
    head: list[int], left: list[int], right: list[int], block_size: int
) -> None:
    mine, other = head + left, head + right
    blocks = common_full_blocks(chain(ROOT, mine, block_size).digests, chain(ROOT, other, block_size).digests)
    assert blocks == common_tokens(mine, other) // block_size


@given(tokens=TOKENS, block_size=BLOCK_SIZES)
def test_a_chain_has_one_digest_per_full_block_and_a_tail_for_the_rest(
    tokens: list[int], block_size: int
) -> None:
    run = chain(ROOT, tokens, block_size)
    assert run.full_blocks == len(tokens) // block_size
    assert len(run.digests) == run.full_blocks * DIGEST_BYTES
    assert bool(run.tail) == bool(len(tokens) % block_size)
    assert run.tokens == len(tokens)


@given(head=TOKENS, more=TOKENS, block_size=BLOCK_SIZES)
def test_a_longer_prompt_keeps_the_digests_of_its_head(
    head: list[int], more: list[int], block_size: int
) -> None:
    short, long = chain(ROOT, head, block_size), chain(ROOT, head + more, block_size)
    assert long.digests.startswith(short.digests)


@given(tokens=TOKENS, known_tokens=st.integers(0, 30), block_size=BLOCK_SIZES)
def test_a_chain_that_goes_on_from_what_is_known_is_the_one_computed_from_its_start(
    tokens: list[int], known_tokens: int, block_size: int
) -> None:
    extras = {block: bytes([block]) for block in range(0, 30, 2)}
    run = chain(ROOT, tokens, block_size, extras)
    longer = [*tokens, *range(30)][: max(known_tokens, len(tokens))]
    for known in (
        run.digests[: known_tokens // block_size * DIGEST_BYTES],
        chain(ROOT, longer, block_size, extras).digests,
    ):
        assert chain(ROOT, tokens, block_size, extras, known) == run


@given(head=TOKENS, left=TOKENS, right=TOKENS, block_size=BLOCK_SIZES)
def test_verified_tokens_are_whole_blocks_or_the_whole_run(
    head: list[int], left: list[int], right: list[int], block_size: int
) -> None:
    held, prompt = head + left, head + right
    verified = verified_tokens(chain(ROOT, held, block_size), chain(ROOT, prompt, block_size))
    if held == prompt:
        assert verified == len(held)
    else:
        assert verified == common_tokens(held, prompt) // block_size * block_size


@pytest.mark.parametrize(
    "field", ["tenant", "model", "weights_version", "lora_name", "lora_path", "cache_salt"]
)
@given(value=st.text())
def test_chains_of_two_roots_never_meet(field: str, value: str) -> None:
    other = replace(ROOT, **{field: value})
    if other == ROOT:
        return
    tokens = list(range(8))
    mine, theirs = chain(ROOT, tokens, 3), chain(other, tokens, 3)
    assert common_full_blocks(mine.digests, theirs.digests) == 0
    assert mine.tail != theirs.tail


@given(
    texts=st.lists(st.text(max_size=4), min_size=6, max_size=6),
    other=st.lists(st.text(max_size=4), min_size=6, max_size=6),
)
def test_no_two_roots_share_a_key_by_moving_text_between_their_fields(
    texts: list[str], other: list[str]
) -> None:
    assert (ChainRoot(*texts).key() == ChainRoot(*other).key()) == (texts == other)


def test_text_moved_from_one_field_to_the_next_makes_another_root() -> None:
    assert ChainRoot("ab", "c").key() != ChainRoot("a", "bc").key()
    assert ChainRoot("a", "b", lora_name="x").key() != ChainRoot("a", "b", lora_path="x").key()


def test_a_root_of_text_that_is_no_valid_unicode_still_has_a_key() -> None:
    assert ChainRoot("t", "m", cache_salt="\ud800").key() != ChainRoot("t", "m", cache_salt="\ud801").key()


@given(block=st.integers(0, 3), extra=st.binary(min_size=1, max_size=8))
def test_extras_of_a_block_change_its_digest_and_all_later_ones(block: int, extra: bytes) -> None:
    tokens = list(range(18))
    plain, extended = chain(ROOT, tokens, 4), chain(ROOT, tokens, 4, {block: extra})
    assert common_full_blocks(plain.digests, extended.digests) == block
    assert plain.tail != extended.tail


def test_every_later_block_depends_on_every_earlier_token() -> None:
    tokens = [7] * 32
    plain = chain(ROOT, tokens, 4)
    for place in range(32):
        edited = tokens.copy()
        edited[place] = 8
        changed = chain(ROOT, edited, 4).digests
        for block in range(8):
            cut = slice(block * DIGEST_BYTES, (block + 1) * DIGEST_BYTES)
            assert (plain.digests[cut] != changed[cut]) == (block >= place // 4)


@pytest.mark.parametrize("damaged", [0, 3, 7])
def test_a_digest_planted_wrong_ends_the_common_prefix_there(damaged: int) -> None:
    digests = bytearray(chain(ROOT, list(range(32)), 4).digests)
    digests[damaged * DIGEST_BYTES] ^= 1
    assert common_full_blocks(bytes(digests), chain(ROOT, list(range(32)), 4).digests) == damaged


def test_a_tail_counts_only_where_both_runs_end() -> None:
    held = chain(ROOT, list(range(10)), 4)
    assert verified_tokens(held, chain(ROOT, list(range(10)), 4)) == 10
    assert verified_tokens(held, chain(ROOT, list(range(11)), 4)) == 8
    assert verified_tokens(held, chain(ROOT, [*range(9), 99], 4)) == 8
    assert verified_tokens(held, chain(ROOT, list(range(9)), 4)) == 8


def test_chains_of_two_block_sizes_share_nothing() -> None:
    tokens = list(range(64))
    assert common_full_blocks(chain(ROOT, tokens, 4).digests, chain(ROOT, tokens, 8).digests) == 0
