"""The text side of a target that lies in a bundle."""

from __future__ import annotations

from functools import cached_property

from tokenizers import Tokenizer

from edge_spec.bundle import Bundle
from edge_spec.errors import BundleError
from edge_spec.export.checkpoint import Vocabulary
from edge_spec.tokenizer_check import check_tokenizer, panics_as_errors, reason


class BundleText:
    """Implements :class:`~edge_spec.export.vocabulary_match.Spoken` for the target of a bundle."""

    def __init__(self, bundle: Bundle) -> None:
        """Nothing is read yet."""
        self.source = str(bundle.path)
        self._bundle = bundle

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The target's vocabulary. Raises BundleError if a file is damaged."""
        manifest, path = self._bundle.manifest, self._bundle.tokenizer_path
        try:
            with panics_as_errors():
                tokenizer = Tokenizer.from_file(str(path))
                check_tokenizer(tokenizer)
        except Exception as error:  # the package raises nothing more specific
            raise BundleError(f"{path} is no tokenizer ({reason(error)}); export the bundle again.") from error
        return Vocabulary(
            tokenizer=tokenizer,
            size=manifest.vocab_size,
            eos_token_ids=manifest.eos_token_ids,
            bos_token_id=manifest.bos_token_id,
            special_token_ids=manifest.special_token_ids,
            chat_template=self._bundle.chat_template(),
            named_tokens=manifest.named_tokens,
        )
