"""The distributions by which vLLM's multi-turn benchmark describes generated conversations. Pure.

Names, fields and meaning are those of `benchmarks/multi_turn` of vLLM; chance comes from the caller's seed.
"""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

from kvlease.core.errors import InvalidArgument

MEDIAN_RATIO = 0.85
"""Median of a lognormal over its average, where the file gives the average alone."""

Sample = Callable[[random.Random], int]
"""Draws a number."""


def distribution(body: Any, where: str) -> Sample:
    """What a section of the file describes; `where` names it in errors.

    Raises:
        InvalidArgument: the section is missing, or a field of it is missing or wrong.
    """
    section = object_of(body, where)
    name = section.get("distribution")
    make = _MAKERS.get(name) if isinstance(name, str) else None
    if make is None:
        raise InvalidArgument(f"{where}.distribution is {name!r}, but must be one of {', '.join(_MAKERS)}")
    fields = _Fields(section, where)
    sample = make(fields)
    at_most = fields.number("max") if fields.has("max") and name != "uniform" else math.inf
    return lambda chance: round(min(sample(chance), at_most))


def object_of(value: Any, where: str) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        InvalidArgument: the value is none; `where` names it.
    """
    if not isinstance(value, dict):
        raise InvalidArgument(f"{where} must be an object, not {kind_of(value)}")
    return cast(Mapping[str, Any], value)


def kind_of(value: Any) -> str:
    """What a value is, for an error."""
    return "nothing" if value is None else f"a {type(value).__name__}"


class _Fields:
    """Numbers of a section, by name."""

    def __init__(self, body: Mapping[str, Any], where: str) -> None:
        self._body = body
        self._where = where

    def has(self, name: str) -> bool:
        return name in self._body

    def number(self, name: str, above: float = 0.0) -> float:
        """A number that must be there.

        Raises:
            InvalidArgument: it is not, or not above `above`.
        """
        value = self._body.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            raise InvalidArgument(f"{self._where}.{name} must be a number above {above:g}, not {value!r}")
        return float(value)

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise InvalidArgument(f"{self._where}: {message}")


def _constant(fields: _Fields) -> Callable[[random.Random], float]:
    value = fields.number("value", above=-1.0)
    return lambda _: value


def _uniform(fields: _Fields) -> Callable[[random.Random], float]:
    low, high = fields.number("min"), fields.number("max")
    fields.require(low <= high, f"min ({low:g}) must not exceed max ({high:g})")
    return lambda chance: chance.randint(math.ceil(low), math.floor(high))


def _lognormal(fields: _Fields) -> Callable[[random.Random], float]:
    if fields.has("average"):
        average = fields.number("average")
        ratio = fields.number("median_ratio") if fields.has("median_ratio") else MEDIAN_RATIO
        fields.require(ratio < 1, f"median_ratio must be below 1, not {ratio:g}")
        # The median is exp(mean), the average exp(mean + sigma² / 2).
        sigma, mean = math.sqrt(-2 * math.log(ratio)), math.log(average * ratio)
    else:
        mean, sigma = fields.number("mean"), fields.number("sigma")
    return lambda chance: chance.lognormvariate(mean, sigma)


def _zipf(fields: _Fields) -> Callable[[random.Random], float]:
    alpha = fields.number("alpha", above=1.0)
    return lambda chance: _zipf_sample(chance, alpha - 1.0)


def _zipf_sample(chance: random.Random, exponent: float) -> float:
    """By rejection (Devroye, Non-Uniform Random Variate Generation, X.6.1)."""
    bound = float(2.0**exponent)
    while True:
        value = math.floor(float((1.0 - chance.random()) ** (-1.0 / exponent)))
        ratio = float((1.0 + 1.0 / value) ** exponent)
        if chance.random() * value * (ratio - 1.0) / (bound - 1.0) <= ratio / bound:
            return value


def _poisson(fields: _Fields) -> Callable[[random.Random], float]:
    expected = fields.number("alpha")

    def sample(chance: random.Random) -> float:
        events, passed = 0, chance.expovariate(1.0)
        while passed < expected:
            events, passed = events + 1, passed + chance.expovariate(1.0)
        return events

    return sample


_MAKERS: Mapping[str, Callable[[_Fields], Callable[[random.Random], float]]] = {
    "constant": _constant,
    "uniform": _uniform,
    "lognormal": _lognormal,
    "zipf": _zipf,
    "poisson": _poisson,
}
