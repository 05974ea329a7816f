"""The Jinja environment of chat templates: a sandbox in which nothing grows beyond its limits."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from edge_spec.errors import MissingDependencyError
from edge_spec.runtime.template_limits import (
    LARGEST_NUMBER,
    LimitReachedError,
    added,
    formatted,
    measure,
    meter,
    multiplied,
    power,
    require_format,
    require_small,
)

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {"*": multiplied, "**": power, "+": added, "%": formatted}
# Their time grows faster than their text.
_SLOW_FILTERS = frozenset({"pprint", "striptags", "urlize", "wordwrap", "xmlattr"})
_LONGEST_SLOW = 20_000
# Filters that take widths or counts, and the largest.
_WIDTHS = {
    **dict.fromkeys(("batch", "center", "indent", "slice", "truncate", "wordwrap"), LARGEST_NUMBER),
    "round": 100,
}
_LONGEST_DATE = 256
_WIDEST_INDENT = 16


def sandbox() -> Any:
    """Create the environment. Jinja2 is only needed by those who chat, so it is imported here.

    Raises:
        MissingDependencyError: Jinja2 is not installed.
    """
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.compiler import CodeGenerator, Frame
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.runtime import Context, Undefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependencyError(
            "a chat template needs Jinja2, which is not installed; pip install jinja2, or give the prompt as text"
        ) from error

    class Generator(CodeGenerator):
        """Sends everything that makes a text or list through the environment."""

        def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
            self.write("environment.joined((")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write("))")

        def visit_List(self, node: nodes.List, frame: Frame) -> None:
            self._counted(super().visit_List, node, frame)

        def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
            self._counted(super().visit_Dict, node, frame)

        def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
            if node.ctx == "load":
                self._counted(super().visit_Tuple, node, frame)
            else:
                super().visit_Tuple(node, frame)

        def _counted(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
            self.write("environment.made(")
            visit(node, frame)
            self.write(")")

    class Sandbox(ImmutableSandboxedEnvironment):
        code_generator_class = Generator
        intercepted_binops = frozenset(_OPERATORS)

        def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
            # Jinja's own answer is an undefined value, which prints as nothing: an attempt would go unnoticed.
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__} is not allowed")

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            return _OPERATORS[operator](left, right)

        def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            args = _checked_call(__obj, args, kwargs)
            return meter().made(super().call(__context, __obj, *args, **kwargs), of=getattr(__obj, "__self__", None))

        def getitem(self, obj: Any, argument: Any) -> Any:
            value = super().getitem(obj, argument)
            return meter().made(value) if isinstance(argument, slice) else value

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            inner: Callable[..., str] | None = super().wrap_str_format(value)
            if inner is None:
                return None

            @functools.wraps(inner)
            def format_checked(*args: Any, **kwargs: Any) -> str:
                require_format(value.__self__, (*args, *kwargs.values()))
                return inner(*args, **kwargs)

            return format_checked

        def joined(self, parts: Iterable[Any]) -> str:
            """The operator ``~``."""
            texts = [part if isinstance(part, str) else str(self.printable(part)) for part in parts]
            meter().about_to_make(sum(map(len, texts)))
            return "".join(texts)

        def made(self, value: Any) -> Any:
            """Count a list or dictionary that the template writes out."""
            return meter().made(value)

        def printable(self, value: Any) -> Any:
            """Pass on what is going to be printed, if its text is of a sane size."""
            if not isinstance(value, str):
                measure(value)
            return value

    def concat(pieces: Iterable[str]) -> str:
        counter, texts = meter(), []
        for piece in pieces:
            counter.about_to_make(len(piece))
            texts.append(piece)
        counter.about_to_make(sum(map(len, texts)))
        return "".join(texts)

    class GenerationBlock(Extension):
        """``{% generation %}``: marks the assistant's tokens for training, and means nothing when prompting."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an attribute of instances

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment: Any = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.finalize = environment.printable
    environment.concat = concat
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _checked_filter(name, filter_) for name, filter_ in environment.filters.items()}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def undeclared_names(environment: Any, source: str) -> set[str]:
    """Variables that a template expects to be given, whether or not a rendering comes across them."""
    from jinja2 import meta

    return meta.find_undeclared_variables(environment.parse(source))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > _LONGEST_DATE or any(character.isdecimal() for character in pattern):
        raise LimitReachedError("it formats a date in a way that no date needs")
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, str) and len(indent) > _WIDEST_INDENT:
        raise LimitReachedError(f"it indents JSON by more than {_WIDEST_INDENT} characters")
    require_small((indent,), _WIDEST_INDENT)
    measure(value)
    # Jinja's own filter escapes HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """Bound what goes into a filter and what comes out."""
    passed = hasattr(filter_, "jinja_pass_arg")  # the environment or context comes first

    @functools.wraps(filter_)
    def checked(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[passed], args[passed + 1 :]
        if name in _WIDTHS:
            require_small((*rest, *kwargs.values()), _WIDTHS[name])
        if name in _SLOW_FILTERS and sum(map(measure, (value, *rest))) > _LONGEST_SLOW:
            raise LimitReachedError(f"it uses the filter {name} on more than {_LONGEST_SLOW:,} characters")
        if name == "replace":
            meter().about_to_make(_replaced_size(str(value), *rest, **kwargs))
        elif name == "format":
            formatted(str(value), kwargs or rest)
        elif name == "join":
            value = list(value)
            separator = kwargs.get("d", rest[0] if rest else "")
            meter().about_to_make(measure(value) + len(value) * measure(separator))
            args = (*args[:passed], value, *rest)
        elif name == "indent":
            width = kwargs.get("width", rest[0] if rest else 4)
            each = len(width) if isinstance(width, str) else int(width)
            meter().about_to_make(len(value) + (value.count("\n") + 1) * each)
        elif name in ("string", "escape", "e", "forceescape", "urlencode", "center", "title", "wordcount"):
            measure(value)
        return meter().made(filter_(*args, **kwargs), of=value)

    return checked


def _checked_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Bound what a method of a text makes; return the arguments to call it with."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(owner, int) and name == "to_bytes":
        require_small((*args, *kwargs.values()))
    if not isinstance(owner, str | bytes):
        return args
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        require_small((*args, *kwargs.values()))
        if name == "expandtabs":
            width = kwargs.get("tabsize", args[0] if args else 8)
            tab = "\t" if isinstance(owner, str) else b"\t"
            meter().about_to_make(len(owner) + owner.count(tab) * max(int(width), 0))  # type: ignore[arg-type]
    elif name == "replace" and isinstance(owner, str):
        meter().about_to_make(_replaced_size(owner, *args, **kwargs))
    elif name == "join" and args:
        items = list(args[0])
        meter().about_to_make(measure(items) + len(owner) * len(items))
        return (items, *args[1:])
    elif name == "translate" and args:
        longest = max((measure(value) for value in args[0].values()), default=1) if isinstance(args[0], dict) else 1
        meter().about_to_make(len(owner) * longest)
    return args


def _replaced_size(text: str, old: Any = "", new: Any = "", *rest: Any, **more: Any) -> int:
    """Characters of ``text.replace(old, new)``, at most."""
    old, new = (str(more.get(key, value)) for key, value in (("old", old), ("new", new)))
    places = text.count(old) if old else len(text) + 1
    return len(text) + places * max(0, len(new) - len(old))
