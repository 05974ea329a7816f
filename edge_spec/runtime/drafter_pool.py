"""An engine's drafters, what has been learned of them, and how a request makes use of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from edge_spec.errors import RequestError
from edge_spec.runtime.acceptance import AcceptanceTable
from edge_spec.runtime.calibration import Calibration
from edge_spec.runtime.context import Context
from edge_spec.runtime.controller import Controller
from edge_spec.runtime.drafters import forced as grammar_drafts
from edge_spec.runtime.drafters.composite import CompositeDrafter
from edge_spec.runtime.drafters.guarded import GuardedDrafter
from edge_spec.runtime.drafters.model_choice import PRIORS, evidence_of
from edge_spec.runtime.drafters.protocol import CostlyDrafter, Drafter, RemembersTexts
from edge_spec.runtime.goodput import Goodput, ProbingCredit
from edge_spec.runtime.proposal import DEFERRED
from edge_spec.runtime.speculation import FixedDraft, Speculation

# Names that stand for something else where it is told who proposed a token.
_RESERVED = ("deferred", "draft", "grammar", "ngram", "target")

# Longer chains of the draft model are hardly ever worth their time.
_USUAL_CHAIN = 8


class DrafterPool:
    """All drafters by name.

    ``"auto"`` uses those that cost next to nothing and the costly one, a draft model or a head, as the controller sees
    fit. ``"free"`` is the same without the costly one. ``"composite"`` is all of them as one, for a fixed number of
    tokens.
    """

    def __init__(
        self,
        calibration: Calibration,
        vocab_size: int,
        free: Sequence[Drafter],
        others: Sequence[Drafter] = (),
        model: CostlyDrafter | None = None,
        clock: Callable[[], float] = perf_counter,
        waiting: Callable[[], int] = lambda: 0,
        unloaded: Sequence[str] = (),
    ) -> None:
        """Collect drafters.

        Args:
            calibration: what calls of target and draft take, and how often the draft is right.
            vocab_size: ids that may be proposed.
            free: drafters that cost next to nothing, the first choice first.
            others: drafters that are used by name only.
            model: the draft model's or the head's, if there is one.
            clock: tells the time, in seconds.
            waiting: how many texts wait while another is being written.
            unloaded: drafters that could have been loaded, and were not.
        """
        self._waiting = waiting
        self._unloaded = unloaded
        self._goodput = Goodput(1.0 / calibration.costs.verify(1, 0))
        self.acceptance = AcceptanceTable({**PRIORS, **grammar_drafts.PRIORS, DEFERRED: 0.95})
        self.acceptance.record(evidence_of(calibration.agreement, "model" if model is None else model.name))
        self._costs = calibration.costs
        self._credit = ProbingCredit()
        self._vocab_size = vocab_size
        self._clock = clock
        self._model = model
        self._context: Context | None = None
        self._free = list(free)
        self._others = list(others)

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may choose by name."""
        return (*(drafter.name for drafter in self._all()), "free", "composite")

    def __getitem__(self, name: str) -> Drafter:
        """The drafter of this name. Raises KeyError if there is none."""
        return {drafter.name: drafter for drafter in self._all()}[name]

    @property
    def memory_bytes(self) -> int:
        """Bytes held by all of them."""
        return sum(drafter.memory_bytes for drafter in self._all())

    def add(self, drafter: Drafter) -> None:
        """Let requests use another drafter, by its name and within ``"auto"``, which asks it in every round.

        What it proposes is checked, see :class:`GuardedDrafter`.

        Raises:
            RequestError: it is no drafter, or its name is taken.
        """
        parts = ("name", "memory_bytes", "propose", "observe", "rollback")
        missing = [part for part in parts if not hasattr(drafter, part)]
        if missing:
            raise RequestError(f"{drafter!r} has no {' and no '.join(missing)}, expected a drafter; see Drafter.")
        name: object = drafter.name
        if not isinstance(name, str) or not name:
            raise RequestError(f"A drafter is called {drafter.name!r}, expected some text.")
        if drafter.name in ("auto", "off", *_RESERVED, *self.names):
            raise RequestError(f"A drafter is called {drafter.name!r}, which is taken; give it another name.")
        self._free.append(GuardedDrafter(drafter, self._vocab_size))

    def worth_of_model(self, past: int) -> float:
        """Share of plain decoding's time that chains of the costly drafter are expected to save, at best; 0 if none.

        Args:
            past: tokens of the text.
        """
        if self._model is None:
            return 0.0
        costs, acceptance = self._costs, self.acceptance.estimate((self._model.name, "greedy", 0))
        plain, step = costs.verify(1, past), costs.draft(past, 1)
        best = 0.0
        for tokens in range(1, _USUAL_CHAIN + 1):
            expected = sum(acceptance**depth for depth in range(tokens + 1))
            seconds = costs.verify(1 + tokens, past) + step * self._model.steps(tokens, None, False)
            best = max(best, 1.0 - seconds / (expected * plain))
        return best

    def begin(self, context: Context) -> None:
        """Draft for this text from now on, if the last turn was another's."""
        if context is self._context:
            return
        self._context = context
        for drafter in self._all():
            if isinstance(drafter, RemembersTexts):
                drafter.switch(context)
            else:
                drafter.rollback(0)

    def end(self, context: Context) -> None:
        """Learn what is left to learn from a text that has ended, if it had the last turn."""
        if context is self._context:
            self.rollback(len(context.tokens))
            self._context = None

    def rollback(self, length: int) -> None:
        """Make all of them forget positions from ``length`` on of the text they last drafted for."""
        for drafter in self._all():
            drafter.rollback(length)

    def speculation(
        self,
        name: str,
        max_draft: int | None,
        branches: bool,
        defer: bool,
        widest: int,
        forced: Drafter | None = None,
    ) -> Speculation | None:
        """What a request asks for.

        Args:
            name: ``"auto"``, ``"free"``, ``"off"`` or the name of a drafter.
            max_draft: most tokens a round. Together with the name of a drafter, it is what every round drafts;
                otherwise the controller decides.
            branches: whether proposals may be trees.
            defer: whether tokens on branches are proposed again rather than committed.
            widest: most draft tokens that the target can take as a tree.
            forced: drafts what the request's grammar forces, if it has one.

        Raises:
            RequestError: there is no such drafter.
        """
        own = {} if forced is None else {forced.name: forced}
        if name not in ("auto", "off", *self.names, *own):
            known = ", ".join(repr(known) for known in ("auto", "off", *self.names, *own))
            hints = {
                "head": " This bundle has no head.",
                "model": " This bundle has no draft model.",
                "grammar": " This request has no grammar.",
                **{one: f" It is in this bundle, but not loaded; load with drafter={one!r}." for one in self._unloaded},
            }
            hint = "".join(text for one, text in hints.items() if one == name)  # what is no name may have no hash
            raise RequestError(f"speculation is {name!r}, expected one of {known}.{hint}")
        if name == "off" or max_draft == 0:
            return None
        free, model = [*own.values(), *self._free], self._model
        if name == "free":
            model = None
        elif name not in ("auto", "composite"):
            chosen = own[name] if name in own else self[name]
            free, model = ([], self._model) if chosen is self._model else ([chosen], None)
        if name in ("auto", "free") or max_draft is None:
            most = widest if max_draft is None else min(max_draft, widest)
            return Controller(
                self._costs,
                self.acceptance,
                self._credit,
                free,
                model,
                most,
                branches,
                defer,
                self._clock,
                self._goodput,
                self._waiting,
            )
        drafters = [*([] if model is None else [model]), *free]
        drafter = drafters[0] if name != "composite" else CompositeDrafter(drafters, self.acceptance)
        return FixedDraft(drafter, max_draft, branches and max_draft <= widest)

    def _all(self) -> tuple[Drafter, ...]:
        return (*self._free, *([] if self._model is None else [self._model]), *self._others)
