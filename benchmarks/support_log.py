"""Writes a log such as the support assistant of a small bicycle shop would have recorded: one domain, many wordings.

    python benchmarks/support_log.py log.jsonl
    edge-spec distill smollm2.pair --prompts log.jsonl --work shop.distill --start-from HEAD

HEAD is one that was trained on all kinds of prompts. The first line of training says what it does on such answers, and
the later ones what going on with the log brings.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SYSTEM = (
    "You are the assistant of Nordwind Cycles, a bicycle workshop in Kiel. Answer tickets in the form: Ticket number, "
    "Customer, Summary, Next step. Be polite and brief."
)
CUSTOMERS = (
    "Mrs Lindqvist",
    "Mr Okafor",
    "Ms Brandt",
    "Mr Petersen",
    "Dr Yilmaz",
    "Mrs Moreau",
    "Mr Novak",
    "Ms Hansen",
)
BIKES = ("city bike", "cargo bike", "touring bike", "e-bike", "folding bike", "children's bike", "gravel bike")
PARTS = ("rear wheel", "chain", "brake cable", "battery", "front light", "saddle", "gear hub", "bottom bracket", "fork")
FAULTS = (
    "makes a grinding noise uphill",
    "has been loose since the last service",
    "broke on the way to work",
    "does not charge above sixty percent",
    "rubs against the frame",
    "was scratched when the bike came back",
    "slips under load",
    "cannot be adjusted any more",
)
WISHES = (
    "asks for an appointment on {day}",
    "wants to know what a repair will cost",
    "asks whether this is covered by the warranty",
    "wants the bike to be picked up at home",
    "asks to borrow another bike meanwhile",
    "wants to cancel the order of {day}",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
FORMS = (
    "Ticket {number}: {customer} writes that the {part} of a {bike} {fault}, and {wish}. Write the reply.",
    "{customer} called about ticket {number}. The {part} of the {bike} {fault}. The customer {wish}. Write the note.",
    "New ticket {number} from {customer}, {bike}: the {part} {fault}. The customer {wish}. Fill in the form.",
)


def prompt(number: int, dice: random.Random) -> str:
    """One ticket."""
    return dice.choice(FORMS).format(
        number=4000 + number,
        customer=dice.choice(CUSTOMERS),
        bike=dice.choice(BIKES),
        part=dice.choice(PARTS),
        fault=dice.choice(FAULTS),
        wish=dice.choice(WISHES).format(day=dice.choice(DAYS)),
    )


def main() -> None:
    """Write the log to the file that is named."""
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/support_log.py FILE")
    dice = random.Random(0)
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        for number in range(160):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt(number, dice)}]
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
