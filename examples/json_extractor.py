"""Turns a text into JSON of a given form: the answer always obeys the schema, however small the model.

    python examples/json_extractor.py coder.pair "Ada Lovelace, 36, lives in London and writes programs."

Needs the extra: pip install 'edge-spec[grammar]'
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import edge_spec

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 150}, {"type": "null"}]},
        "city": {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "null"}]},
        "occupations": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "occupations"],
    "additionalProperties": False,
}


def main() -> int:
    """Extract one record, and print it with what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder written by 'edge-spec export'")
    parser.add_argument("text", help="what to read, or - for stdin")
    parser.add_argument("--schema", type=Path, metavar="FILE", help="a JSON schema of your own (a person)")
    arguments = parser.parse_args()
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    schema = PERSON if arguments.schema is None else json.loads(arguments.schema.read_text("utf-8"))

    with edge_spec.load(arguments.bundle, context=2048) as engine:
        record, completion = extract(engine, text, schema)
    print(json.dumps(record, indent=2, ensure_ascii=False))
    statistics = completion.statistics
    print(
        f"{statistics.new_tokens} tokens in {statistics.rounds} target calls, "
        f"accepted by drafter: {statistics.accepted_by_drafter}",
        file=sys.stderr,
    )
    return 0


def extract(engine: edge_spec.Engine, text: str, schema: dict[str, Any]) -> tuple[Any, edge_spec.Completion]:
    """Read a text into an object that obeys ``schema``.

    Raises:
        ValueError: the answer was cut off before it was complete.
    """
    messages = [
        {"role": "system", "content": f"Extract what the text says as JSON of this schema:\n{json.dumps(schema)}"},
        {"role": "user", "content": text},
    ]
    completion = engine.chat(messages, grammar=edge_spec.Grammar.json_schema(schema), max_new_tokens=300)
    if completion.finish_reason != "stop":
        raise ValueError(f"the answer ended by {completion.finish_reason} and is not whole: {completion.text}")
    return json.loads(completion.text), completion


if __name__ == "__main__":
    sys.exit(main())
