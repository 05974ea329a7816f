from __future__ import annotations
import numpy as np
from collections.abc import Callable, Iterator, Sequence
from edge_spec.runtime.proposal import Evidence, Law, Proposal


class _Node:
    __slots__ = ("children", "evidence", "law", "chance", "token", "index")
    def __init__(self, token=-1):
        self.token = token
        self.evidence: list[Evidence] = []
        self.children: dict[int, _Node] = {}
        self.law = None
        self.chance = 1.0


class CandidateTree:
    def __init__(self) -> None:
        self._root = _Node()

    def clear(self) -> None:
        self._root = _Node()

    def add(self, proposal: Proposal, at: Sequence[int] = ()) -> None:
        node = self._root
        for token in at:
            node = node.children.get(token)
            if node is None:
                return
        rows = [node]
        parents = proposal.parents
        for index, token in enumerate(proposal.tokens):
            parent = rows[index if parents is None else parents[index] + 1]
            if parent is None or (parent.law is not None and token not in parent.children):
                rows.append(None)
                continue
            child = parent.children.get(token)
            if child is None:
                child = parent.children[token] = _Node(token)
            if proposal.evidence is not None:
                child.evidence.append(proposal.evidence[index])
            rows.append(child)
        if proposal.q is not None:
            for row, node in enumerate(rows):
                if node is not None and node.children and proposal.law(row) is not None:
                    node.law = proposal.law(row)

    def compared_with(self, tokens) -> list[tuple[Evidence, bool]]:
        seen = []
        node = self._root
        for token in tokens:
            for child in node.children.values():
                for e in child.evidence:
                    seen.append((e, child.token == token))
            node = node.children.get(token)
            if node is None:
                break
        return seen

    def select(self, acceptance, cost, most, branches):
        nodes = []
        stack = [(self._root, 1.0)]
        while stack:
            node, chance = stack.pop()
            for child in node.children.values():
                a = max(map(acceptance, child.evidence)) if child.evidence else 0.5
                child.chance = chance * a
                stack.append((child, child.chance))
                nodes.append((child, node))
        if not branches:
            nodes = []
            node = self._root
            while node.children:
                child = max(node.children.values(), key=lambda c: c.chance)
                nodes.append((child, node)); node = child
        else:
            nodes.sort(key=lambda n: -n[0].chance)
        gain = best = 0.0
        count = 0
        for n, (node, _) in enumerate(nodes[:most], 1):
            gain += node.chance
            worth = gain - cost(n)
            if worth > best:
                best, count = worth, n
        chosen = nodes[:count]
        ids = {id(n) for n, _ in chosen}
        # trunk
        order = []
        node = self._root
        while True:
            kids = [c for c in node.children.values() if id(c) in ids]
            if not kids: break
            node = max(kids, key=lambda c: c.chance)
            order.append(node)
        trunk = {id(n) for n in order}
        order += [n for n, _ in chosen if id(n) not in trunk]
        index = {id(self._root): -1}
        for i, n in enumerate(order): index[id(n)] = i
        parent_of = {id(n): p for n, p in chosen}
        parents = tuple(index[id(parent_of[id(n)])] for n in order)
        chain = parents == tuple(range(-1, len(order) - 1))
        q = [self._root.law, *(n.law for n in order)]
        q = q if any(l is not None for l in q) else None
        return Proposal(tuple(n.token for n in order), q, None if chain else parents, evidence=tuple(n.evidence[0] if n.evidence else ("draft",) for n in order)), best
