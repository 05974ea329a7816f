"""Takes memory until little is left in its control group, and holds it until its stdin says otherwise."""

from __future__ import annotations

import sys

from edge_spec.runtime.free_memory import available_memory

_STEP = 2 << 20


def main() -> None:
    """Print a line when so much is taken that ``argv[1]`` bytes are left."""
    left = int(sys.argv[1])
    held = []
    while (available := available_memory()) is not None and available > left + _STEP:
        held.append(b"\1" * _STEP)
    print(len(held) * _STEP, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
