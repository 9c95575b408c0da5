"""Messages for violations of a schema: which field, and what it must be."""

import re
from collections.abc import Mapping

import msgspec

TENANT = r"^[A-Za-z0-9_.]([A-Za-z0-9_.@ -]{0,126}[A-Za-z0-9_.@-])?(?![\s\S])"
SHA256 = "^[0-9a-f]{64}$"
COMMIT = r"^([0-9a-f]{40})?(?![\s\S])"
CURRENCY = "^[A-Z]{3}$"

_RULES: Mapping[str, str] = {
    TENANT: "1 to 128 letters, digits, '_', '.', '@', '-' and inner spaces, not starting with '@' or '-'",
    COMMIT: "a commit of 40 lowercase hex digits, or empty",
    SHA256: "64 lowercase hex digits (SHA-256)",
    CURRENCY: "three capital letters, such as USD",
}
_TYPES: Mapping[str, str] = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<field>[^`]+)`")
_TYPE = re.compile(r"Expected `(?P<expected>[^`]+)`, got `(?P<got>[^`]+)`")
_BOUND = re.compile(r"Expected `[^`]+` (?P<length>of length )?(?P<sign>>=|<=|>|<) (?P<bound>\S+)")
_PATTERN = re.compile(r"Expected `str` matching regex (?P<pattern>.+)")
_SIGNS = {">=": "at least", "<=": "at most", ">": "greater than", "<": "less than"}


def validation_message(error: msgspec.ValidationError, prefix: str = "") -> tuple[str, str]:
    """Return the message, and the path of the field below `prefix` ("" for the whole body)."""
    text = str(error)
    path = prefix
    if at := _PATH.search(text):
        step = at["path"]
        path += step if not prefix or step.startswith("[") or not step else f".{step}"
        text = text[: at.start()]
    path = path.removesuffix("[...]")
    for pattern, problem in ((_MISSING, "is required"), (_UNKNOWN, "is not a known field")):
        if found := pattern.search(text):
            path = f"{path}.{found['field']}" if path else found["field"]
            return f"'{path}' {problem}", path
    name = f"'{path}'" if path else "the body"
    return f"{name}{_problem(text)}", path


def _problem(text: str) -> str:
    if found := _TYPE.fullmatch(text):
        return f" must be {_types(found['expected'])}, not {_types(found['got'])}"
    if found := _BOUND.fullmatch(text):
        if found["length"] and (found["sign"], found["bound"]) == (">=", "1"):
            return " must not be empty"
        verb = "have a length of" if found["length"] else "be"
        return f" must {verb} {_SIGNS[found['sign']]} {found['bound']}"
    if found := _PATTERN.fullmatch(text):
        for pattern, rule in _RULES.items():
            if found["pattern"] == repr(pattern):
                return f" must be {rule}"
    return f": {text[:1].lower()}{text[1:]}"


def _types(names: str) -> str:
    """Return the types of a union in words, without null unless it stands alone."""
    parts = [name for name in names.split(" | ") if name != "null"] or ["null"]
    return " or ".join(_TYPES.get(name, name) for name in parts)
