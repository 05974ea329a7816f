"""The counts of a growing history equal counting it anew, and cost one look at each token."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.runtime.history import History, chain_paths, tree_paths

tokens = st.integers(0, 400)
steps = st.lists(st.one_of(st.lists(tokens, max_size=300), st.floats(0, 1)), max_size=6)


def counted(history: History) -> dict[int, int]:
    ids, emitted = history.counts()
    assert len(set(ids.tolist())) == len(ids) == len(emitted)
    return dict(zip(ids.tolist(), emitted.astype(int).tolist(), strict=True))


@settings(deadline=None)
@given(st.lists(tokens, max_size=300), steps)
def test_counts_follow_every_growth_and_cut(prompt: list[int], changes: list[list[int] | float]) -> None:
    history = History(list(prompt))
    for change in changes:
        if isinstance(change, float):
            history.rollback(len(prompt) + round(change * (len(history.tokens) - len(prompt))))
        else:
            history.tokens.extend(change)
        output = Counter(history.tokens[len(prompt) :])
        assert counted(history) == {token: output[token] for token in history.tokens}
        assert all(history.emitted(token) == output[token] for token in range(0, 401, 7))


def test_a_cut_back_prompt_is_counted_anew() -> None:
    history = History([1, 2, 3], prompt_length=2)
    assert counted(history) == {1: 0, 2: 0, 3: 1}
    history.rollback(1)
    assert history.tokens == [1]
    assert counted(history) == {1: 0}


def test_each_token_is_looked_at_once() -> None:
    class Watched(list[int]):
        looks = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            self.looks += len(found) if isinstance(index, slice) else 1
            return found

    watched = Watched(range(5000))
    history = History(watched)
    assert watched.looks == 0  # nobody has asked yet
    for new in range(50):
        watched.append(new)
        for _ in range(9):
            history.counts()
            history.emitted(new)
    assert watched.looks == 5050


def test_paths_of_a_chain_are_its_prefixes() -> None:
    assert chain_paths([]) == [()]
    assert chain_paths([7, 8, 7]) == [(), (7,), (7, 8), (7, 8, 7)]


def test_paths_of_a_tree_lead_from_the_root_to_each_node() -> None:
    #      7      9
    #    8   5    4
    assert tree_paths([7, 8, 5, 9, 4], [-1, 0, 0, -1, 3]) == [(), (7,), (7, 8), (7, 5), (9,), (9, 4)]
    assert tree_paths([1, 2, 3], [-1, 0, 1]) == chain_paths([1, 2, 3])


def test_a_cut_that_is_filled_up_again_before_anyone_asks_is_noticed() -> None:
    history = History([1], prompt_length=1)
    history.tokens.extend([2, 2, 3])
    assert counted(history) == {1: 0, 2: 2, 3: 1}
    history.rollback(2)
    history.tokens.extend([4, 4])
    assert counted(history) == {1: 0, 2: 1, 4: 2}
