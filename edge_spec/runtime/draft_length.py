"""Where a chain ends whose tokens are drawn one after the other, and cost time only to verify (docs/heads-block.md).

Of l tokens the target is expected to keep a_1 + ... + a_l, with a_j the product of the first j chances. The best l
could be found by looking at all of them. But what is known of a later token depends on the earlier draws: if that
decided whether they are proposed, a token would be proposed because of what it is, and what the rules of verification
emit would no longer be the target's law. So the chain ends before the first token that does not pay for itself. Whether
it does is then decided by what comes before it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod


def pays(chances: Sequence[float], cost: Callable[[int], float], before: int = 0) -> bool:
    """Whether the last token of a chain is worth verifying, if all before it are.

    Args:
        chances: that each is accepted if those before it are; the first may stand for what leads to the chain.
        cost: what verifying n tokens costs more than verifying none, in tokens that could be had in that time.
        before: tokens that are proposed in any case.
    """
    count = before + len(chances) - 1
    return prod(chances) > cost(count) - cost(count - 1)
