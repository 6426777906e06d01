"""A strategy's parameters as a form, made from their own schema."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any, Final

from headway_scheduler.errors import InvalidField
from headway_scheduler.strategies.base import Parameters

__all__ = ["Field", "fields_of", "values_of"]

_PREFIX: Final = "p."


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter: `kind` is number, integer, choice, flag or text."""

    name: str
    kind: str
    value: str
    default: str
    description: str
    low: str = ""
    high: str = ""
    choices: tuple[str, ...] = ()

    @property
    def input_name(self) -> str:
        """Its name in the form."""
        return _PREFIX + self.name


def fields_of(parameters: type[Parameters], values: Mapping[str, Any]) -> list[Field]:
    """The form's fields, in the parameters' order, with the values in force."""
    schema = parameters.model_json_schema()
    known = schema.get("$defs", {})
    return [_field(name, _resolved(each, known), values) for name, each in schema.get("properties", {}).items()]


def values_of(parameters: type[Parameters], form: Mapping[str, str], before: Mapping[str, Any]) -> dict[str, Any]:
    """What a form sent, as JSON values: those that were set before, and those that are not the default.

    The others go on following their defaults. What is not a number where one is wanted raises InvalidField.
    """
    values = {}
    for field in fields_of(parameters, {}):
        text = form.get(field.input_name, "")
        if (text or field.kind == "flag") and (field.name in before or _text(_read(field, text)) != field.default):
            values[field.name] = _read(field, text)
    return values


def _resolved(schema: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None and len(schema.get("allOf", ())) == 1:
        reference = schema["allOf"][0].get("$ref")
    return {**known.get(str(reference).rpartition("/")[2], {}), **schema} if reference else dict(schema)


def _field(name: str, schema: Mapping[str, Any], values: Mapping[str, Any]) -> Field:
    default = schema.get("default")
    return Field(
        name=name,
        kind="choice" if "enum" in schema else _KINDS.get(schema.get("type", ""), "text"),
        value=_text(values.get(name, default)),
        default=_text(default),
        description=schema.get("description", ""),
        low=_text(schema.get("minimum", schema.get("exclusiveMinimum"))),
        high=_text(schema.get("maximum", schema.get("exclusiveMaximum"))),
        choices=tuple(map(str, schema.get("enum", ()))),
    )


_KINDS: Final = {"number": "number", "integer": "integer", "boolean": "flag", "string": "text"}


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read(field: Field, text: str) -> Any:  # a JSON value of the parameter's own type
    if field.kind == "flag":
        return text == "true"
    if field.kind not in ("number", "integer"):
        return text
    try:
        number = int(text) if field.kind == "integer" else float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise InvalidField(f"strategy.parameters.{field.name}", f"{text!r} is no number")
    return number
