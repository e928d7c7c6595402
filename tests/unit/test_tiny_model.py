"""The test model: reproducible, one token per byte, and it writes printable text only."""

from __future__ import annotations

import json
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvlease.dev import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.ensure_tiny_model(tmp_path_factory.mktemp("cache"))


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def test_the_same_bytes_are_written_each_time(folder: Path, tmp_path: Path) -> None:
    tiny_model.write_model(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in folder.iterdir())
    assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in tmp_path.iterdir())


def test_the_weights_are_random_and_of_the_shapes_in_the_header(folder: Path) -> None:
    header, data = read_header(folder / "model.safetensors")
    header.pop("__metadata__")
    assert sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values()) == len(data)
    start, end = header["model.layers.3.self_attn.k_proj.weight"]["data_offsets"]
    values = array("f", data[start:end])
    std = (sum(value * value for value in values) / len(values)) ** 0.5
    assert std == pytest.approx(1.5 / 256**0.5, rel=0.02)


def test_only_printable_bytes_can_be_written(folder: Path) -> None:
    header, data = read_header(folder / "model.safetensors")
    start, end = header["lm_head.weight"]["data_offsets"]
    weights = array("f", data[start:end])
    biases = [weights[row * tiny_model.HIDDEN] for row in range(tiny_model.VOCABULARY)]
    assert {row for row, bias in enumerate(biases) if bias == 0.0} == set(range(0x20, 0x7F))


def test_each_byte_is_one_token_and_its_own_id(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(tiny_model.VOCABULARY))
    assert tokenizer["model"]["merges"] == []
    assert (vocabulary["A"], vocabulary["\u0120"], vocabulary["\u010a"]) == (0x41, 0x20, 0x0A)


def test_a_model_already_there_is_returned_as_it_is(folder: Path) -> None:
    marker = folder / "config.json"
    before = marker.stat().st_mtime_ns
    assert tiny_model.ensure_tiny_model(folder.parent) == folder
    assert marker.stat().st_mtime_ns == before
