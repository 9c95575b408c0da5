"""Chat templates: a conversation as the text that the model was trained on.

Templates are untrusted, as they come with models: they run in an immutable sandbox on plain JSON values.
The environment is the one that Hugging Face templates expect.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.core.errors import BadRequest
from gateway.inference.tool_calls import tool_form

# For models without a template: one line a message, then the assistant's turn.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


# Raised by expressions in templates, beside jinja2's own errors.
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Generation(Extension):
    """`{% generation %}`, which marks text for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template and the special tokens that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(source)
        self._special = dict(special_tokens)
        self.tool_form = tool_form(source)
        variables = meta.find_undeclared_variables(environment.parse(source))
        self.takes_tools = "tools" in variables

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt up to the assistant's next turn. Raises BadRequest where the template fails."""
        try:
            return self._template.render(
                {
                    **self._special,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": True,
                }
            )
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"the model's chat template rejects this conversation: {error}", param="messages"
            ) from None
        except _FAULTS as error:
            raise BadRequest(
                f"the model's chat template failed on this conversation: {error}", param="messages"
            ) from None


def template_source(tokenizer_config: Mapping[str, object], file: str | None) -> tuple[str, str | None]:
    """Return the default template and, where there is one, the template for tools.

    `file` is the text of chat_template.jinja, which takes precedence over tokenizer_config.json.
    """
    if file is not None:
        return file, None
    given = tokenizer_config.get("chat_template")
    if isinstance(given, str):
        return given, None
    if isinstance(given, list):
        named = {
            entry["name"]: template
            for entry in given
            if isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(template := entry.get("template"), str)
        }
        if "default" in named:
            return named["default"], named.get("tool_use")
    return DEFAULT_TEMPLATE, None
