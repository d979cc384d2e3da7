"""Chat messages to the prompt text a model was trained on, through the checkpoint's template.

Knows where a checkpoint keeps its templates and which forms of messages they can be given. Refuses to know ids, models
and the HTTP API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from novalm_jax.errors import CheckpointError, RequestError
from novalm_jax.text.files import is_there, read_optional_json, read_text
from novalm_jax.text.template_sandbox import CompiledTemplate, compile_template

# A message's reasoning goes under one of these; templates read the first.
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class ChatTemplates:
    """The chat templates of one checkpoint, by name; the usual one is "default"."""

    texts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplates:
        """Finds the templates of a checkpoint folder. The first of these places that has any is used, alone:

        1. `chat_template.jinja` (the default one) with `additional_chat_templates/*.jinja` and
           `chat_templates/*.jinja`, each named by its file;
        2. `chat_template` of `tokenizer_config.json`: a text, or a list of `{"name", "template"}`;
        3. `chat_template.json`: an object with `chat_template` as in 2.

        Raises:
          CheckpointError: one of them has another form, or cannot be read.
        """
        files = {
            path.stem: path
            for name in ("chat_templates", "additional_chat_templates")
            for path in sorted((folder / name).glob("*.jinja"))
        }
        if is_there(default := folder / "chat_template.jinja"):
            files["default"] = default
        if files:
            return cls({name: read_text(path) for name, path in files.items()})
        legacy = folder / "chat_template.json"
        for path, data in ((folder / "tokenizer_config.json", tokenizer_config), (legacy, read_optional_json(legacy))):
            if (stored := data.get("chat_template")) is not None:
                return cls(_stored_templates(stored, path))
        return cls()

    def choose(self, chat_template: str | None = None, *, with_tools: bool = False) -> str:
        """The text of the template to use.

        A given `chat_template` is the name of a stored one or, if it holds Jinja, the template itself. Without it a
        chat with tools takes "tool_use" where that exists, and everything else "default".

        Raises:
          RequestError: none fits, and the message names those there are; or this is no text.
        """
        if not isinstance(chat_template, str | None):
            raise RequestError(f"chat_template must be a text, not {type(chat_template).__name__}.")
        stored = ", ".join(sorted(self.texts)) or "none"
        if chat_template is not None:
            if chat_template not in self.texts and "{" not in chat_template:
                raise RequestError(
                    f"chat_template {chat_template!r} is neither the name of a template of this checkpoint (it has: "
                    f"{stored}) nor the text of one."
                )
            return self.texts.get(chat_template, chat_template)
        for name in ("tool_use", "default") if with_tools else ("default",):
            if name in self.texts:
                return self.texts[name]
        if self.texts:
            raise RequestError(f"This checkpoint has no default chat template; name one as chat_template: {stored}.")
        raise RequestError(
            "This checkpoint has no chat template (no chat_template.jinja, and none in tokenizer_config.json), so it "
            "cannot take chat messages. Plain completion of a prompt works; a template can also be given as "
            "chat_template."
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of `messages`.

        Args:
          messages: objects with "role" and "content": a text, None, or a list of `{"type": "text", "text": ...}`.
          tools: JSON schemas of the functions the model may call, handed to the template as they are.
          chat_template: see `choose`.
          add_generation_prompt: end with the opening of the assistant's turn.
          variables: further template variables, such as `bos_token`.

        Raises:
          RequestError: messages of another form, and everything that goes wrong inside the template.
        """
        text = self.choose(chat_template, with_tools=bool(tools))
        try:
            compiled = compile_template(text)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(f"The chat template is not valid Jinja, line {error.lineno}: {error.message}") from error
        context = {"documents": None, **{name: _plain(value, name) for name, value in (variables or {}).items()}}
        context["messages"] = _prepare_messages(messages, compiled)
        context["tools"] = _prepare_tools(tools)
        context["add_generation_prompt"] = add_generation_prompt
        try:
            return compiled.template.render(context)
        # A template is foreign code: whatever it raises is its answer to this request, not a fault of the process.
        except Exception as error:
            reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise RequestError(f"The chat template cannot render these messages: {reason}") from error


def _prepare_messages(messages: Sequence[Mapping[str, Any]], compiled: CompiledTemplate) -> list[dict[str, Any]]:
    """Fresh copies of `messages` in the form that the template reads.

    Fields that are None are left out, as templates test for absence. Arguments of tool calls that are JSON text
    become objects, as templates write them out as JSON themselves. A `RequestError` names the message that is wrong.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one object with a role and a content.")
    return [_prepare_message(message, f"messages[{index}]", compiled) for index, message in enumerate(messages)]


def _prepare_message(message: object, where: str, compiled: CompiledTemplate) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with a role and a content, not {type(message).__name__}.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} has no role; give it one, such as 'user'.")
    prepared = {name: _plain(value, f"{where}.{name}") for name, value in message.items() if value is not None}
    if "content" in prepared:
        prepared["content"] = _content(prepared["content"], where, compiled)
    reasoning = next((prepared[name] for name in _REASONING_FIELDS if name in prepared), None)
    if reasoning is not None:
        prepared.setdefault("reasoning_content", reasoning)
    for call in prepared.get("tool_calls") or ():
        _parse_arguments(call)
    return prepared


def _content(content: Any, where: str, compiled: CompiledTemplate) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content if compiled.takes_text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a text or a list of parts, not {type(content).__name__}.")
    texts = [_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    # How several parts are joined is the template's affair where it knows parts, and nobody's convention elsewhere.
    if compiled.takes_text and (len(texts) < 2 or not compiled.takes_lists):
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where} must be an object with a type, such as {{'type': 'text', 'text': '...'}}.")
    if part["type"] != "text":
        raise RequestError(f"{where} is of type {part['type']!r}; only parts of type 'text' can be read.")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where} is of type 'text' and must have a text.")
    return part["text"]


def _parse_arguments(call: Any) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            arguments = json.loads(function["arguments"])
        # A model may have written these; what is not JSON goes back to it as it was.
        except ValueError:
            return
        if isinstance(arguments, dict):
            function["arguments"] = arguments


def _prepare_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if not tools:
        return None
    if isinstance(tools, str | Mapping) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of JSON schemas, one object for each function.")
    return [_plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _plain(value: Any, where: str) -> Any:
    """A copy of `value` in JSON's own types, so that a template cannot reach methods of other objects."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    # str() of an enumeration that is also a text gives its name, hence the unbound methods.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise RequestError(f"{where} holds a {type(value).__name__}; only JSON data can go to a chat template.")


def _stored_templates(stored: object, path: Path) -> dict[str, str]:
    if isinstance(stored, str):
        return {"default": stored}
    if isinstance(stored, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in stored
    ):
        return {entry["name"]: entry["template"] for entry in stored}
    raise CheckpointError(f"{path}: chat_template must be a text or a list of objects with a name and a template.")
