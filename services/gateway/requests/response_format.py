"""OpenAI's `response_format`, with vLLM's additions, as `structured_outputs`."""

from typing import Any

import msgspec

from pagewire.shared.errors import invalid_field


class _JsonSchema(msgspec.Struct):
    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None


class _Text(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    pass


class _JsonObject(msgspec.Struct, tag="json_object", forbid_unknown_fields=True):
    pass


class _JsonSchemaFormat(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True):
    json_schema: _JsonSchema


class _StructuralTag(msgspec.Struct, tag="structural_tag", forbid_unknown_fields=True):
    structures: list[dict[str, Any]]
    triggers: list[str]


_Format = _Text | _JsonObject | _JsonSchemaFormat | _StructuralTag


def structured_outputs(response_format: object) -> dict[str, Any] | None:
    """Returns the value of `structured_outputs` that means the same; None: a text may have any form.

    Raises:
        InvalidRequest: the format is malformed or unknown.
    """
    try:
        match msgspec.convert(response_format, _Format):
            case _JsonObject():
                return {"json_object": True}
            case _JsonSchemaFormat(json_schema):
                schema = json_schema.schema
                return {"json": schema if isinstance(schema, dict) else msgspec.json.encode(schema).decode()}
            case _StructuralTag(structures, triggers):
                return {"structural_tag": {"structures": structures, "triggers": triggers}}
            case _:
                return None
    except msgspec.ValidationError as error:
        reason = str(error).replace("`$", "`response_format")
        raise invalid_field("response_format", f"is malformed: {reason}") from error
