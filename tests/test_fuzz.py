"""A little of the fuzzer: whatever is in a file, it is accepted or refused, without a crash or a hang."""

from __future__ import annotations

import sys

import pytest

import fuzz
from hostile_files import CHANGES


def test_hostile_files_of_every_kind_are_accepted_or_refused() -> None:
    outcomes, findings = fuzz.run(seconds=20, inputs=20 * len(CHANGES), seed=0, only=None)
    assert not findings
    assert {kind for kind, _ in outcomes} == set(CHANGES)


@pytest.mark.parametrize(
    ("script", "found"),
    [("os.abort()", "died with status -6"), ("time.sleep(99)", "hung for 1 seconds"), ("sys.exit(3)", "status 3")],
)
def test_the_fuzzer_notices_a_child_that_is_lost(script: str, found: str) -> None:
    child = fuzz.Child(
        [sys.executable, "-c", f"import os, sys, time\nprint('ready', flush=True)\ninput()\n{script}"], 1
    )
    assert child.ask("manifest", 0) == ("bad", found if "status 3" not in found else "died with status 3")
    child.stop()
