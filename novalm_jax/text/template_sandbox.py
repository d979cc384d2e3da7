"""Chat templates as untrusted Jinja programs: how they are compiled, what they may call, how they read messages.

Knows Jinja and the helper functions that templates of the field expect. Refuses to know checkpoints, files and
messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(frozen=True)
class CompiledTemplate:
    """A template ready to render.

    Attributes:
      template: the Jinja template.
      takes_lists: it goes through the parts of a message whose content is a list.
      takes_text: it writes a content that is a plain text.
    """

    template: jinja2.Template
    takes_lists: bool
    takes_text: bool


@lru_cache(maxsize=64)
def compile_template(text: str) -> CompiledTemplate:
    """Compiles `text`; the last 64 are kept.

    Raises:
      jinja2.TemplateSyntaxError: not valid Jinja.
    """
    environment = _environment()
    tree = environment.parse(text)
    takes_lists, takes_text = _reads_content(tree)
    return CompiledTemplate(environment.from_string(text), takes_lists, takes_text)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's own words for training; a prompt shows its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _reads_content(tree: nodes.Template) -> tuple[bool, bool]:
    """Whether the template takes a message's content as a list of parts, and whether as a text."""
    names = _content_names(tree)
    takes_lists = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)) or any(
        _is_part(access.node, names)
        for access in tree.find_all((nodes.Getattr, nodes.Getitem))
        if isinstance(access, nodes.Getattr | nodes.Getitem)
    )
    # A template that goes through lists takes texts as well only if it looks which of the two it was given.
    looks = any(
        test.name in ("string", "iterable", "sequence") and _is_content(test.node, names)
        for test in tree.find_all(nodes.Test)
    )
    return takes_lists, looks or not takes_lists


def _content_names(tree: nodes.Template) -> set[str]:
    """The variables that hold a message's content."""
    names = {arg.name for macro in tree.find_all(nodes.Macro) for arg in macro.args if "content" in arg.name}
    while True:
        found = {name for name, value in _assignments(tree) if _is_content(value, names)} - names
        if not found:
            return names
        names |= found


def _assignments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Expr]]:
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and isinstance(assign.node, nodes.Expr):
            yield assign.target.name, assign.node


def _is_part(node: nodes.Node, names: set[str]) -> bool:
    """Whether this is one part of a content, as in `message.content[0]`."""
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and isinstance(node.arg.value, int)
        and _is_content(node.node, names)
    )


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Filter():
            return _is_content(node.node, names)
        case nodes.Or():
            return _is_content(node.left, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case _:
            return False
