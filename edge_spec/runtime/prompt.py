"""What a request continues: text, token ids or chat messages, turned into checked token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from edge_spec.errors import BundleError, PromptTooLongError, RequestError
from edge_spec.manifest import Manifest
from edge_spec.runtime.chat_template import ChatTemplate
from edge_spec.runtime.tokenizer import TextTokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class PromptEncoder:
    """Turns prompts into token ids that fit the context with room for at least one more."""

    def __init__(self, tokenizer: TextTokenizer, manifest: Manifest, chat_template: str | None, context: int) -> None:
        """Encode for one model.

        Args:
            tokenizer: encodes text.
            manifest: has the size of the vocabulary, the named special tokens and the longest context.
            chat_template: source of the template; ``None`` if there is none.
            context: most tokens of prompt and output together.
        """
        self._tokenizer = tokenizer
        self._manifest = manifest
        self._template_source = chat_template
        self._context = context

    def encode(self, prompt: Prompt | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: text, token ids, or chat messages for the template.
            tools: functions the model may call, as JSON schemas, for the template.

        Raises:
            PromptTooLongError: it leaves no room for an answer.
            RequestError: it is none of these, empty, or holds ids that do not exist; or nobody would read the tools.
            BundleError: the tokenizer is damaged, or not that of the models.
        """
        tokens: list[int]
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
            raise RequestError(
                f"The prompt is a {type(prompt).__name__}; expected text, a sequence of token ids, or chat messages."
            )
        elif len(prompt) and isinstance(prompt[0], Mapping):
            tokens = self._tokenizer.encode(self._rendered(prompt, tools), add_special_tokens=False)  # type: ignore[arg-type]
            tools = None
        else:
            tokens = _checked_ids(prompt, self._manifest.vocab_size)
        if tools:
            raise RequestError("tools are for the chat template; give chat messages with them instead of a text.")
        if tokens and max(tokens) >= self._manifest.vocab_size:
            raise BundleError(
                f"The tokenizer gives the id {max(tokens)}, but this vocabulary has {self._manifest.vocab_size} ids; "
                "export the bundle again."
            )
        if not tokens:
            raise RequestError("The prompt is empty; expected at least one token.")
        if len(tokens) >= self._context:
            raise PromptTooLongError(
                f"The prompt has {len(tokens)} tokens, which leaves no room in the context of {self._context}; shorten "
                f"it, or load the bundle with a larger context (up to {self._manifest.context_length})."
            )
        return tokens

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        if not tools:
            return self._template.render(messages)
        if not self._template.takes_tools:
            raise RequestError(
                "This model's chat template takes no tools, and would leave them out; describe them in a message, or "
                "use a model that was trained to call tools."
            )
        return self._template.render(messages, tools=[dict(tool) for tool in tools])

    @cached_property
    def _template(self) -> ChatTemplate:
        """The chat template, read when somebody chats: a broken one is no obstacle to continuing text."""
        if self._template_source is None:
            raise RequestError("This bundle has no chat template; give the prompt as text instead of messages.")
        return ChatTemplate(self._template_source, self._manifest.named_tokens)


def _checked_ids(prompt: Sequence[Any], vocab_size: int) -> list[int]:
    ids = []
    for token in prompt:
        try:
            index = operator.index(token)
        except TypeError:
            index = None
        if index is None or isinstance(token, bool):
            raise RequestError(
                f"The prompt holds {token!r}; expected text, a sequence of integer token ids, or chat messages."
            )
        if not 0 <= index < vocab_size:
            raise RequestError(f"Token id {index} is out of range; this vocabulary has ids 0 to {vocab_size - 1}.")
        ids.append(index)
    return ids
