"""Settings as text: what a command line or a file gives becomes the fields of a launcher, with their types. Pure."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from envfleet.contract.errors import UsageError
from envfleet.contract.settings import require_known

Settings = TypeVar("Settings")

_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclasses.dataclass(frozen=True, slots=True)
class TextForm:
    """How a setting of one type is written.

    Args:
        expected: What a text must be, for errors.
        metavar: What stands for a text in the help of a command.
        read: Turns a text into a value, or raises ValueError.
        repeats: Several texts make one value: a list or, if `is_mapping`, a dict.
        is_mapping: Each text is "NAME=VALUE".
        is_switch: The setting is on or off; a command may leave out "true".
    """

    expected: str
    metavar: str
    read: Callable[[str], Any]
    repeats: bool = False
    is_mapping: bool = False
    is_switch: bool = False

    def value_of(self, name: str, given: Any) -> Any:
        """Return the value of a setting.

        Args:
            name: The name of the setting, for errors.
            given: A text or a list of texts, which are read; anything else is returned as it is.

        Raises:
            UsageError: A text is not as expected.
        """
        is_list = isinstance(given, list | tuple)
        if not (is_list or isinstance(given, str)):
            return given
        values = [self._read(name, each) if isinstance(each, str) else each for each in (given if is_list else [given])]
        if self.is_mapping:
            return dict(values)
        return values if self.repeats or not values else values[-1]

    def _read(self, name: str, text: str) -> Any:
        try:
            return self.read(text)
        except ValueError as error:
            raise UsageError(f"{name} must be {self.expected}; got {text!r}") from error


def settings_from_text(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """Build a launcher from settings that may be text.

    Args:
        kind: The class of the launcher, a dataclass.
        given: Its settings by name. A text, or each text of a list, is turned into the type of the setting; other
            values are taken as they are. Of several texts for one value the last counts.

    Returns:
        The launcher; it has checked its settings.

    Raises:
        UsageError: There is no such setting, one is missing, or a value is wrong.
    """
    forms = forms_of(kind)
    require_known(given, forms, kind.__name__)
    missing = [name for name in required_settings(kind) if name not in given]
    if missing:
        raise UsageError(f"{kind.__name__} needs a value for {missing[0]!r}")
    return kind(**{name: forms[name].value_of(name, value) for name, value in given.items()})


def forms_of(kind: type) -> dict[str, TextForm]:
    """Return how each setting of a launcher is written, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: _form(hints[field.name]) for field in dataclasses.fields(kind)}


def required_settings(kind: type) -> list[str]:
    """Return the names of the settings that have no default."""
    none = dataclasses.MISSING
    return [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory is none]


def _form(hint: Any) -> TextForm:
    kinds, is_optional = _kinds(hint)
    first, origin = kinds[0], typing.get_origin(kinds[0])
    if origin is Mapping:
        return _mapping_form(typing.get_args(first)[1])
    if origin is Sequence:
        of_mappings = typing.get_origin(typing.get_args(first)[0]) is Mapping
        item = TextForm("a JSON object", "JSON", _json_object) if of_mappings else TextForm("text", "TEXT", str)
        return dataclasses.replace(item, repeats=True)
    form = _single_form(kinds, first, origin)
    if not is_optional or str in kinds:  # where any text is allowed, "none" is one, and None the default
        return form
    read = form.read
    return dataclasses.replace(
        form,
        expected=f"{form.expected}, or 'none'",
        read=lambda text: None if text.lower() == "none" else read(text),
    )


def _single_form(kinds: Sequence[Any], first: Any, origin: Any) -> TextForm:
    if first is bool:
        return TextForm("true or false", "true|false", _switch, is_switch=True)
    if origin is typing.Literal:
        choices = typing.get_args(first)
        return TextForm(f"one of {', '.join(choices)}", "|".join(choices), lambda text: _choice(text, choices))
    if str in kinds and int in kinds:
        return TextForm("text or a whole number", "TEXT", lambda text: int(text) if text.isdecimal() else text)
    if int in kinds:
        return TextForm("a whole number", "N", int)
    if float in kinds:
        return TextForm("a number", "N", _number)
    if Any in kinds:
        return TextForm("JSON, or text", "TEXT", _json_or_text)
    return TextForm("text", "TEXT", str)


def _mapping_form(value_hint: Any) -> TextForm:
    value_kinds, may_be_absent = _kinds(value_hint)
    of_value = _single_form(value_kinds, value_kinds[0], None)

    def read(text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not name or not (equals or may_be_absent):
            raise ValueError(text)
        return name, of_value.read(value) if equals else None

    expected = f"NAME=VALUE, the value {of_value.expected}"
    return TextForm(expected, "NAME=VALUE", read, repeats=True, is_mapping=True)


def _kinds(hint: Any) -> tuple[list[Any], bool]:
    """Return the types that a hint allows besides None, and whether it allows None."""
    # Optional of a Literal or a Mapping is typing's own union, "int | None" is Python's.
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if is_union else (hint,)
    return [kind for kind in kinds if kind is not type(None)], type(None) in kinds


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError(text)
    return _SWITCH[text.lower()]


def _choice(text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise ValueError(text)
    return text


def _number(text: str) -> float:
    """Return a whole number as an int: manifests are to say "2", not "2.0"."""
    return int(text) if text.isdecimal() else float(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value
