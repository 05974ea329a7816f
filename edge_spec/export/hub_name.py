"""What checkpoints on the Hugging Face hub are called.

``owner/name`` is a checkpoint of safetensors, ``owner/name/file.gguf`` one GGUF file, and ``owner/name:Q4_K_M`` the
GGUF file of that quantization. ``@revision`` may follow: a branch, a tag or a commit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:/(?P<file>[^@]+\.gguf)|:(?P<quantization>[\w.-]+))?"
    r"(?:@(?P<revision>[\w.][\w./-]*))?"
)


@dataclass(frozen=True)
class HubName:
    """What one checkpoint on the hub is called.

    Attributes:
        repository: ``owner/name``.
        file: a GGUF file in there, or ``None``.
        quantization: of the GGUF file that is wanted, or ``None``.
        revision: branch, tag or commit; ``None`` for the main branch.
    """

    repository: str
    file: str | None = None
    quantization: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        part = f"/{self.file}" if self.file else f":{self.quantization}" if self.quantization else ""
        return f"{self.repository}{part}{f'@{self.revision}' if self.revision else ''}"


def parse_hub_name(text: str) -> HubName | None:
    """Return what a text names on the hub, or ``None`` if it cannot be such a name."""
    match = _NAME.fullmatch(text)
    # A name that ends so is a file somebody expected here.
    return None if match is None or match["repository"].endswith(".gguf") else HubName(**match.groupdict())
