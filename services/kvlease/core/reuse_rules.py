"""For which models and tenants KV is reused: rules, the first that fits counts.

[[rule]]
model = "llama-70b"      # left out: any model
tenant = "acme"          # left out: any tenant
reuse = "verify-only"    # off, verify-only or on
"""

import tomllib
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from kvlease.core.errors import InvalidArgument


class ReuseMode(Enum):
    """What becomes of a conversation's KV.

    OFF: nothing is kept, and nothing is read. VERIFY_ONLY: turns are kept and computed anew; samples compare what
    reuse would have answered. ON: leases are reused.
    """

    OFF = "off"
    VERIFY_ONLY = "verify-only"
    ON = "on"


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """One rule; an empty model or tenant is any."""

    reuse: ReuseMode
    model: str = ""
    tenant: str = ""

    def fits(self, model: str, tenant: str) -> bool:
        """Whether it is about such a turn."""
        return self.model in ("", model) and self.tenant in ("", tenant)


class ReuseRules:
    """The rules in force; `load` replaces them at once.

    Args:
        default: where no rule fits.
    """

    def __init__(self, default: ReuseMode = ReuseMode.ON, rules: tuple[ReuseRule, ...] = ()) -> None:
        self._default = default
        self._rules = rules

    def load(self, rules: tuple[ReuseRule, ...]) -> None:
        """From here on these rules count."""
        self._rules = rules

    def mode(self, model: str, tenant: str) -> ReuseMode:
        """What becomes of the KV of a turn."""
        for rule in self._rules:
            if rule.fits(model, tenant):
                return rule.reuse
        return self._default


def parse_rules(text: str) -> tuple[ReuseRule, ...]:
    """The rules of a TOML text.

    Raises:
        InvalidArgument: it makes no sense; says where.
    """
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"no TOML: {error}") from error
    unknown = sorted(set(body) - {"rule"})
    listed = body.get("rule", [])
    if unknown or not isinstance(listed, list):
        raise InvalidArgument(f"only [[rule]] is known, not {unknown[0]!r}" if unknown else "write [[rule]]")
    return tuple(_rule(number, rule) for number, rule in enumerate(cast("list[object]", listed), start=1))


def _rule(number: int, value: object) -> ReuseRule:
    if not isinstance(value, dict):
        raise InvalidArgument(f"rule {number} is no table")
    fields = cast("dict[str, Any]", value)
    unknown = sorted(set(fields) - {"model", "tenant", "reuse"})
    if unknown:
        raise InvalidArgument(f"rule {number}: unknown {unknown[0]!r}; known are model, tenant, reuse")
    model, tenant = fields.get("model", ""), fields.get("tenant", "")
    if not isinstance(model, str) or not isinstance(tenant, str):
        raise InvalidArgument(f"rule {number}: model and tenant are strings")
    try:
        mode = ReuseMode(fields.get("reuse"))
    except ValueError:
        modes = ", ".join(mode.value for mode in ReuseMode)
        raise InvalidArgument(f"rule {number}: reuse must be one of {modes}") from None
    return ReuseRule(mode, model, tenant)
