"""The draft tokens of several drafters as one tree, and which of them are worth their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from edge_spec.runtime.proposal import UNKNOWN, Evidence, Law, Proposal


@dataclass(frozen=True)
class Selection:
    """The part of a tree that is worth verifying.

    Attributes:
        proposal: its tokens; none if nothing is worth its cost.
        accepted: how many of them the target is expected to accept.
        gain: what they are worth, less what they cost; in tokens.
    """

    proposal: Proposal
    accepted: float
    gain: float


class CandidateTree:
    """Draft tokens keyed by the path of tokens that leads to them. Rows are numbered as in :class:`Proposal`.

    Chains and trees of any number of drafters lie on top of each other: a token that is there already gains evidence,
    and receives the children. What speaks most strongly for a token counts. One proposal may have been drawn from
    laws. Its tokens are the only children of their rows, since a sibling would change from which law what is left was
    drawn.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._evidence: list[list[Evidence]] = []
        self._children: list[dict[int, int]] = [{}]  # by row: token -> node
        self._laws: dict[int, Law] = {}  # by row
        self._last_drawn = -1  # the node where the drawn chain ends

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, proposal: Proposal, at: Sequence[int] = ()) -> None:
        """Lay a proposal into the tree. Tokens beside a drawn one are left out, with all that continues them.

        Args:
            proposal: a chain or a tree of determined tokens; or a chain drawn from laws.
            at: the path of tokens that it continues.

        Raises:
            ValueError: the tree has no such path, or a drawn proposal is not a chain, or not the first of its kind,
                or a row on its way has children already.
        """
        start = self._row(at)
        drawn = [index for index in range(len(proposal)) if proposal.law(index) is not None]
        if drawn:
            self._require_room(proposal, start)
        children, parents = self._children, proposal.parents
        rows = [start]  # the tree's row for each of the proposal's; -1: left out
        for index, token in enumerate(proposal.tokens):
            row = rows[index if parents is None else parents[index] + 1]
            node = children[row].get(token) if row >= 0 else None
            if node is not None:
                if proposal.evidence is not None and proposal.evidence[index] not in self._evidence[node]:
                    self._evidence[node].append(proposal.evidence[index])
                rows.append(node + 1)
            elif row < 0 or row in self._laws:
                rows.append(-1)
            else:
                children[row][token] = len(self._tokens)
                children.append({})
                self._tokens.append(token)
                self._parents.append(row - 1)
                self._evidence.append([UNKNOWN if proposal.evidence is None else proposal.evidence[index]])
                rows.append(len(self._tokens))
        for index in drawn:
            law = proposal.law(index)
            assert law is not None
            self._laws[rows[index]] = law
            self._last_drawn = rows[index + 1] - 1

    def continues(self, path: Sequence[int]) -> bool:
        """Whether anything continues a path, or a drawn proposal is there already."""
        return self._last_drawn >= 0 or bool(self._children[self._row(path)])

    def select(
        self,
        acceptance: Callable[[Evidence], float],
        cost: Callable[[int], float],
        most: int,
        branches: bool = True,
        off_trunk: float = 1.0,
    ) -> Selection:
        """The nodes that bring the most accepted tokens for what they cost.

        A node is accepted with probability S, the product of the acceptance probabilities along its path. Of n nodes
        those with the largest S bring the most; they include their parents. So n is all that is left to choose. The
        same holds if a token off the trunk, the path on which most tokens are expected, is worth less than one on it.

        Drawn tokens are not subject to choice, since what continues a token says something about the token: to drop
        it on that ground would bias the text. Whether they are worth their cost is asked before they are drawn.

        Args:
            acceptance: the probability, 0 to 1, that a token with this evidence is accepted if its parent is.
            cost: what verifying n tokens costs more than verifying none, in tokens that could be had in that time.
            most: the most tokens to select. A longer drawn chain is cut there.
            branches: whether a tree may be selected; if not, it is a chain.
            off_trunk: what an accepted token off the trunk is worth, from 0 to 1.

        Returns:
            The proposal, its trunk the path on which most tokens are expected, then the other nodes by S.
        """
        tokens, parents = self._tokens, self._parents
        chances: list[float] = []  # S by node
        reach: list[float] = []  # tokens expected on the path that ends at the node
        strongest: list[Evidence] = []
        for parent, evidence in zip(parents, self._evidence, strict=True):
            strongest.append(evidence[0] if len(evidence) == 1 else max(evidence, key=acceptance))
            chance = acceptance(strongest[-1])
            if parent < 0:
                chances.append(chance)
                reach.append(chance)
            else:
                chances.append(chance * chances[parent])
                reach.append(reach[parent] + chances[-1])
        owed = self._owed(most)
        through = owed[-1] if owed else -1
        values = chances
        if branches:
            if off_trunk < 1.0 and chances:
                trunk = set(_likeliest_path(range(len(chances)), parents, reach, through))
                values = [chance if node in trunk else off_trunk * chance for node, chance in enumerate(chances)]
            order = trunk_first(_best_nodes(values, owed, cost, most), parents, reach, through)
        else:
            order = _best_chain(parents, reach, through, cost, most)
        accepted = sum([chances[node] for node in order])
        gain = sum([values[node] for node in order]) - cost(len(order)) if order else 0.0
        return Selection(lay_out(order, tokens, parents, strongest, self._laws), accepted, gain)

    def compared_with(self, told: Sequence[int]) -> Iterator[tuple[Evidence, bool]]:
        """For every token whose predecessors all proved right, what spoke for it, and whether it did too.

        Args:
            told: what the target says from the root on.
        """
        row = 0
        for token in told:
            children = self._children[row]
            for child, node in children.items():
                for evidence in self._evidence[node]:
                    yield evidence, child == token
            if token not in children:
                return
            row = children[token] + 1

    def _row(self, path: Sequence[int]) -> int:
        row = 0
        for token in path:
            node = self._children[row].get(token)
            if node is None:
                raise ValueError(f"the tree has no path {tuple(path)}; add what leads there first")
            row = node + 1
        return row

    def _require_room(self, proposal: Proposal, start: int) -> None:
        if not proposal.is_chain:
            raise ValueError("a drawn tree cannot be merged; draw a chain, or determine the tokens")
        if self._last_drawn >= 0:
            raise ValueError("the tree holds a drawn proposal already, and can take only one")
        if self._children[start]:
            raise ValueError("a drawn proposal needs a place without children; add it before the others")

    def _owed(self, most: int) -> list[int]:
        """The drawn tokens and what leads to them, parents first."""
        return _path(self._last_drawn, self._parents)[: max(most, 0)]


def trunk_first(nodes: Sequence[int], parents: Sequence[int], reach: Sequence[float], through: int = -1) -> list[int]:
    """Put the path on which most is expected first, so that it is contiguous in the cache; keep the others in order.

    Args:
        nodes: some nodes of a tree, each after its parent.
        parents: by node; -1 for none.
        reach: by node, how many tokens are expected on the path that ends there.
        through: the path leads through this node; -1 for any.
    """
    if not nodes:
        return []
    trunk = _likeliest_path(nodes, parents, reach, through)
    on_trunk = set(trunk)
    return trunk + [node for node in nodes if node not in on_trunk]


def lay_out(
    order: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    evidence: Sequence[Evidence],
    laws: Mapping[int, Law] = MappingProxyType({}),
) -> Proposal:
    """Some nodes of a tree, in this order, as a proposal.

    Args:
        order: nodes, each after its parent.
        tokens: by node.
        parents: by node; -1 for none.
        evidence: by node.
        laws: by row of the tree, where its children were drawn from a law.
    """
    if not order:
        return Proposal()
    places = {node: place for place, node in enumerate(order)}
    places[-1] = -1
    laid = tuple([places[parents[node]] for node in order])
    q: list[Law | None] | None = None
    if laws:
        q = [None] * len(order)
        for place, node in enumerate(order):
            q[laid[place] + 1] = laws.get(parents[node] + 1)
    return Proposal(
        tokens=tuple([tokens[node] for node in order]),
        q=q,
        parents=None if laid == tuple(range(-1, len(order) - 1)) else laid,
        evidence=tuple([evidence[node] for node in order]),
    )


def _likeliest_path(nodes: Sequence[int], parents: Sequence[int], reach: Sequence[float], through: int) -> list[int]:
    """The path on which most tokens are expected, of those that lead through a node."""
    # Where two paths promise the same, the one that ends later: it may be the longer one.
    return _path(max(_beyond(through, nodes, parents), key=lambda node: (reach[node], node)), parents)


def _best_nodes(values: Sequence[float], owed: Sequence[int], cost: Callable[[int], float], most: int) -> list[int]:
    """The owed nodes and the best of the others; each follows its parent, which is never worth less."""
    ranked = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    expected = 0.0
    if owed:
        first = set(owed)
        ranked = [*owed, *[node for node in ranked if node not in first]]
        expected = sum([values[node] for node in owed])
    best, count = expected - cost(len(owed)), len(owed)
    for size in range(len(owed) + 1, min(len(ranked), most) + 1):
        expected += values[ranked[size - 1]]
        gain = expected - cost(size)
        if gain > best:
            best, count = gain, size
    return ranked[:count]


def _best_chain(
    parents: Sequence[int], reach: Sequence[float], through: int, cost: Callable[[int], float], most: int
) -> list[int]:
    """The path, through a node if there is one, that brings the most for its cost."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    costs = [cost(size) for size in range(max(min(most, max(depths, default=0)), 0) + 1)]
    end, best = -1, -inf if through >= 0 else 0.0
    for node in _beyond(through, range(len(parents)), parents):
        if depths[node] < len(costs) and reach[node] - costs[depths[node]] > best:
            end, best = node, reach[node] - costs[depths[node]]
    return _path(end, parents)


def _path(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes that lead to a node, and the node; none for -1."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _beyond(through: int, nodes: Sequence[int], parents: Sequence[int]) -> Sequence[int]:
    """Those of the nodes, each after its parent, whose path leads through a node; all of them for -1."""
    if through < 0:
        return nodes
    found = {through}
    for node in nodes:
        if parents[node] in found:
            found.add(node)
    return sorted(found)
