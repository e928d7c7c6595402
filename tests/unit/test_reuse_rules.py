"""Rules that say for whom KV is reused."""

import pytest

from kvlease.core.errors import InvalidArgument
from kvlease.core.reuse_rules import ReuseMode, ReuseRules, parse_rules

TEXT = """
[[rule]]
model = "big"
tenant = "acme"
reuse = "on"
[[rule]]
tenant = "acme"
reuse = "off"
[[rule]]
model = "big"
reuse = "verify-only"
"""


@pytest.mark.parametrize(
    ("model", "tenant", "mode"),
    [
        ("big", "acme", ReuseMode.ON),
        ("small", "acme", ReuseMode.OFF),
        ("big", "other", ReuseMode.VERIFY_ONLY),
        ("small", "other", ReuseMode.ON),
    ],
)
def test_the_first_rule_that_fits_counts(model: str, tenant: str, mode: ReuseMode) -> None:
    assert ReuseRules(rules=parse_rules(TEXT)).mode(model, tenant) is mode


def test_rules_are_replaced_at_once() -> None:
    rules = ReuseRules(ReuseMode.VERIFY_ONLY, parse_rules(TEXT))
    rules.load(())
    assert rules.mode("small", "acme") is ReuseMode.VERIFY_ONLY


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("= 1", "no TOML"),
        ("[x]", "'x'"),
        ("rule = 1", r"\[\[rule\]\]"),
        ("rule = [1]", "rule 1 is no table"),
        ("[[rule]]\nreuse = 'maybe'", "rule 1: reuse must be one of off, verify-only, on"),
        ("[[rule]]\nreuse = 'on'\n[[rule]]\nreuse = 'on'\nuser = 'x'", "rule 2: unknown 'user'"),
        ("[[rule]]\nreuse = 'on'\nmodel = 1", "rule 1: model and tenant are strings"),
    ],
)
def test_rules_that_make_no_sense_are_refused_with_their_place(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_rules(text)
