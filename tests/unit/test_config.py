"""Settings come from file, environment and flags; nonsense is refused with names and values."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from kvlease.runtime.config import (
    ConfigError,
    add_config_arguments,
    describe_config,
    load_config,
    require,
    setting,
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class PaintConfig:
    """Settings of a process that paints."""

    interval_s: float = setting(5.0, "seconds between strokes")
    lease_s: float = setting(20.0, "seconds that a wall is ours")
    layers: int = setting(2, "coats of paint")
    colour: Colour = setting(Colour.RED, "which paint")
    dry: bool = setting(False, "whether 100% of it must dry")
    key: str = setting("", "opens the store room", secret=True)

    def validate(self) -> None:
        require(
            3 * self.interval_s <= self.lease_s,
            f"3 * interval_s ({self.interval_s:g}) must not exceed lease_s ({self.lease_s:g})",
        )


def parse(*flags: str) -> Namespace:
    parser = ArgumentParser()
    add_config_arguments(parser, PaintConfig)
    return parser.parse_args(flags)


def test_defaults_hold_when_nothing_is_said() -> None:
    assert load_config(PaintConfig, "paint", parse(), {}) == PaintConfig()


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "paint.toml"
    file.write_text('layers = 3\ncolour = "blue"\ninterval_s = 1\ndry = true\n')
    environment = {"KVLEASE_PAINT_LAYERS": "4", "KVLEASE_PAINT_INTERVAL_S": "2", "KVLEASE_OTHER_X": "1"}
    config = load_config(PaintConfig, "paint", parse("--config", str(file), "--layers", "5"), environment)
    assert config == PaintConfig(interval_s=2.0, layers=5, colour=Colour.BLUE, dry=True)


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "paint.toml"
    file.write_text("layers = 3\n")
    assert load_config(PaintConfig, "paint", parse(), {"KVLEASE_PAINT_CONFIG": str(file)}).layers == 3


def test_an_unknown_key_is_refused_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "paint.toml"
    file.write_text("layer = 3\n")
    with pytest.raises(ConfigError, match=r"paint.toml: unknown setting layer; known are .*layers"):
        load_config(PaintConfig, "paint", parse("--config", str(file)), {})
    with pytest.raises(ConfigError, match="unknown setting layer"):
        load_config(PaintConfig, "paint", parse(), {"KVLEASE_PAINT_LAYER": "3"})
    with pytest.raises(SystemExit):
        parse("--layerz", "3")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("LAYERS", "many", "int"),
        ("LAYERS", "1.5", "int"),
        ("DRY", "perhaps", "bool"),
        ("COLOUR", "green", "one of red, blue"),
    ],
)
def test_a_value_of_the_wrong_type_names_what_is_wanted(key: str, value: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"{key.lower()} is '{value}', but must be {wanted}"):
        load_config(PaintConfig, "paint", parse(), {f"KVLEASE_PAINT_{key}": value})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('interval_s = "5"', "interval_s is '5', but must be float"),
        ("interval_s = true", "interval_s is True, but must be float"),
        ("layers = 1.5", "layers is 1.5, but must be int"),
        ('layers = "3"', "layers is '3', but must be int"),
        ('dry = "yes"', "dry is 'yes', but must be bool"),
        ("dry = 1", "dry is 1, but must be bool"),
        ("key = 7", "key is 7, but must be str"),
    ],
)
def test_a_value_in_a_file_is_of_the_settings_own_kind(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "paint.toml"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=said):
        load_config(PaintConfig, "paint", parse("--config", str(file)), {})


def test_a_broken_relation_names_both_values() -> None:
    with pytest.raises(ConfigError, match=r"interval_s \(10\) must not exceed lease_s \(20\)"):
        load_config(PaintConfig, "paint", parse("--interval-s", "10"), {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml"):
        load_config(PaintConfig, "paint", parse("--config", str(tmp_path / "absent.toml")), {})


def test_a_flag_without_a_value_is_true() -> None:
    assert load_config(PaintConfig, "paint", parse("--dry"), {}).dry
    assert not load_config(PaintConfig, "paint", parse("--dry", "no"), {}).dry


def test_secrets_are_not_shown() -> None:
    shown = describe_config(PaintConfig(key="sesame"))
    assert shown["key"] == "<redacted>"
    assert shown["colour"] == "red"
    assert "sesame" not in str(shown)


def test_a_secret_comes_from_a_file_or_the_environment_and_never_from_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "paint.toml"
    file.write_text('key = "from the file"')
    assert load_config(PaintConfig, "paint", parse("--config", str(file)), {}).key == "from the file"
    assert load_config(PaintConfig, "paint", parse(), {"KVLEASE_PAINT_KEY": "sesame"}).key == "sesame"
    with pytest.raises(SystemExit):
        parse("--key", "sesame")
    assert "unrecognized arguments" in capsys.readouterr().err


def test_help_shows_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    assert "100% of it" in shown
    assert "default: red" in shown
