"""Reading YAML without its surprises: `1e-4` is a number, `no` is a word, no key counts twice, "true" is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from flex_trainer.errors import UserError


class RecipeError(UserError):
    """A user's mistake in a recipe or a launch configuration, said in one line."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe reader with the number and boolean words of YAML 1.2."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
# YAML 1.1, which PyYAML reads, takes `no` and `off` for false, so `save_strategy: no` or `distributed_type: NO` would
# not be what they look like. Only true and false are booleans here.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
# YAML 1.1 wants a dot in a float and reads 1e-4 as text.
_Loader.add_implicit_resolver(_FLOAT, re.compile(r"^[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


_AROUND = " \t\n'\"`\u00ab\u00bb\u2018\u2019\u201a\u201c\u201d\u201e"
"""Blanks and quotation marks; a word processor writes the typographic ones."""
_BOOLEAN_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "y", "1"), "true"),
    **dict.fromkeys(("false", "no", "off", "n", "0"), "false"),
}


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        RecipeError: not readable, not YAML, not a mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not a text file in UTF-8") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: is not valid YAML: {_problem(error)}") from error
    if not isinstance(content, dict):
        kind = "nothing" if content is None else type(content).__name__
        raise RecipeError(f"{path}: must hold keys and values at the top, found {kind}")
    return content


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set one value in place, from `section.key=value`; the value is read as YAML.

    Raises:
        RecipeError: not of that form, or a path through something that is not a section.
    """
    place, equals, text = override.partition("=")
    keys = place.split(".")
    if not equals or not all(keys):
        raise RecipeError(f"override {override!r} is not of the form section.key=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: the value is not valid YAML: {_problem(error)}") from error
    target = content
    for depth, key in enumerate(keys[:-1]):
        below = target.get(key)
        if below is None:
            below = target[key] = {}
        if not isinstance(below, dict):
            path = ".".join(keys[: depth + 1])
            raise RecipeError(f"override {override!r}: {path} is {below!r}, which has no keys below it")
        target = below
    target[keys[-1]] = value


def refuse_quoted_booleans(content: Any, path: str = "") -> None:
    """Raise ValueError for the text "true" or "false" anywhere, in whatever quotes: in Python any text is true.

    Raises:
        ValueError: the place and the value.
    """
    if isinstance(content, dict):
        for key, value in content.items():
            refuse_quoted_booleans(value, f"{path}.{key}" if path else str(key))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            refuse_quoted_booleans(value, f"{path}[{index}]")
    elif isinstance(content, str) and (word := _bare(content)) in ("true", "false"):
        raise UserError(f"{path}: the text {content!r} is not a boolean; write {word} unquoted")


def refuse_boolean_word(place: str, value: Any) -> None:
    """Raise ValueError for what stands for a boolean in other formats, where one is needed; anything else passes.

    Args:
        place: path of the key.
        value: not a boolean.

    Raises:
        ValueError: yes, on, 1, 0 and their like, with the word to write instead.
    """
    word = _BOOLEAN_WORDS.get(_bare(str(value)))
    if word is not None:
        raise UserError(f"{place}: {value!r} is not a boolean; write {word}")


def _bare(text: str) -> str:
    """The text in lower case, without blanks and quotation marks around it, typographic ones included."""
    return text.strip(_AROUND).lower()


def _problem(error: yaml.YAMLError) -> str:
    """One line: what and where."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{what} (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else what
