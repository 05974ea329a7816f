"""Which draft tokens the target keeps, and what it says itself: pure functions of arrays, one file for each rule."""

from __future__ import annotations

from edge_spec.runtime.verification.block import verify_block
from edge_spec.runtime.verification.coupled import verify_coupled, verify_greedy
from edge_spec.runtime.verification.rule import Chance, Laws, Rule, Verdict
from edge_spec.runtime.verification.token import verify_token
from edge_spec.runtime.verification.traversal import verify_traversal

RULES = {
    rule.name: rule
    for rule in (
        Rule("coupled", verify_coupled, trees=True, coupled=True),
        Rule("token", verify_token, trees=False, coupled=False),
        Rule("block", verify_block, trees=False, coupled=False),
        Rule("traversal", verify_traversal, trees=True, coupled=False),
    )
}

__all__ = [
    "RULES",
    "Chance",
    "Laws",
    "Rule",
    "Verdict",
    "verify_block",
    "verify_coupled",
    "verify_greedy",
    "verify_token",
    "verify_traversal",
]
