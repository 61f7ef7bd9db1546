"""The OpenAPI document of the HTTP routes, from the structs that decode requests and encode answers."""

import math
from collections.abc import Collection
from functools import cache
from html import escape
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec

from pagewire.services.gateway.answers import openai_shapes
from pagewire.services.gateway.answers.ollama_lines import MEDIA_TYPE
from pagewire.services.gateway.answers.ollama_shapes import OllamaChatAnswer, OllamaGenerateAnswer
from pagewire.services.gateway.http.errors import MESSAGES, OLLAMA, AnthropicsErrorBody, ErrorBody, OllamasErrorBody
from pagewire.services.gateway.requests.anthropic_request import MessagesRequest
from pagewire.services.gateway.requests.chat_request import ChatCompletionRequest
from pagewire.services.gateway.requests.completion_request import FIELDS, CompletionRequest
from pagewire.services.gateway.requests.ollama_request import OllamaChatRequest, OllamaGenerateRequest
from pagewire.services.gateway.requests.responses_request import PASSED, ResponsesRequest
from pagewire.services.gateway.routes import anthropic_messages, responses
from pagewire.services.gateway.routes.adapters import AdapterAnswer, LoadAdapterBody, UnloadAdapterBody
from pagewire.services.gateway.routes.ollama_models import ShowAnswer, ShowRequest
from pagewire.services.gateway.routes.tokenization import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenCount,
    TokenizeAnswer,
    TokenizeBody,
)
from pagewire.shared.messages.adapters import LoadAdapterRequest, UnloadAdapterRequest
from pagewire.shared.messages.client import GenerateRequest, SamplingParams
from pagewire.shared.sampling_parameters import PARAMETERS
from pagewire.shared.settings.flags import describe


class Route(NamedTuple):
    """A route that takes a JSON body."""

    request: type[msgspec.Struct]
    answer: type[msgspec.Struct]
    summary: str
    sampling: bool = False
    """Whether vLLM's sampling parameters may stand beside the fields of the request."""
    stream_type: str = "text/event-stream"
    """Media type of an answer that is a stream; empty: no answer is one."""
    passed: Collection[str] = ()
    """Fields of a chat that may stand beside those of the request."""


ROUTES = {
    "/v1/completions": Route(
        CompletionRequest, openai_shapes.Completion, "Continues texts, in OpenAI's shape.", sampling=True
    ),
    "/v1/chat/completions": Route(
        ChatCompletionRequest, openai_shapes.ChatCompletion, "Answers a chat, in OpenAI's shape.", sampling=True
    ),
    "/v1/responses": Route(
        ResponsesRequest, responses.ModelResponse, "Answers a chat, in OpenAI's newer shape.", passed=PASSED
    ),
    "/v1/messages": Route(MessagesRequest, anthropic_messages.Message, "Answers a chat, in Anthropic's shape."),
    "/api/chat": Route(
        OllamaChatRequest, OllamaChatAnswer, "Answers a chat, in Ollama's shape.", stream_type=MEDIA_TYPE
    ),
    "/api/generate": Route(
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        "Answers a prompt or, with `raw`, continues it, in Ollama's shape.",
        stream_type=MEDIA_TYPE,
    ),
    "/api/show": Route(ShowRequest, ShowAnswer, "Describes a model, in Ollama's shape.", stream_type=""),
    "/v1/messages/count_tokens": Route(
        MessagesRequest,
        TokenCount,
        "Counts the tokens of a chat, in Anthropic's shape.",
        stream_type="",
    ),
    "/tokenize": Route(TokenizeBody, TokenizeAnswer, "Returns the tokens of a text, as vLLM does.", stream_type=""),
    "/v1/load_lora_adapter": Route(
        LoadAdapterBody, AdapterAnswer, "Loads an adapter (LoRA) at run time, as vLLM does.", stream_type=""
    ),
    "/v1/unload_lora_adapter": Route(
        UnloadAdapterBody, AdapterAnswer, "Removes an adapter, as vLLM does.", stream_type=""
    ),
    "/detokenize": Route(DetokenizeBody, DetokenizeAnswer, "Returns the text of tokens, as vLLM does.", stream_type=""),
}
"""The routes that take a JSON body, by path."""
MEANINGS = {
    "echo": "Refused unless false: the answer never repeats the conversation.",
    "input": "A text, or the items of the conversation.",
    "instructions": "What the model is told ahead of the conversation.",
    "max_output_tokens": "Maximum number of generated tokens; by default up to the context length.",
    "metadata": "OpenAI's has no effect; Anthropic's `user_id` is the `user` of other routes.",
    "model": "Name of the model; may be left out where only one is served.",
    "output_config": "`format`: a JSON schema that the answer keeps to; `effort`: how much the model reasons.",
    "reasoning": "How the model reasons, if its chat template lets the request decide.",
    "stop_sequences": "Texts that end the answer.",
    "stream_options": "`include_usage`: the usage comes at the end; `continuous_usage_stats`: and with every event.",
    "system": "What the model is told ahead of the conversation.",
    "text": "`format`: a form that the answer must have, such as a JSON schema.",
    "thinking": "Whether the model reasons before it answers, if its chat template lets the request decide.",
    "tokens": "The token ids.",
}
"""Meanings of the fields that neither their own struct nor one of the pipeline describes."""
GET_PATHS = {
    "/": "The console, a page for people, unless `--no-console`.",
    "/api/tags": "The models, in Ollama's shape.",
    "/api/ps": "The same as /api/tags: a model that is not loaded is loaded by the next request.",
    "/api/version": "The release of Ollama whose routes these are.",
    "/health": "200 while a request for a model would be served, else 503 and the reason; `?model=NAME`: for this one.",
    "/readyz": "The same as /health.",
    "/livez": "200 while the gateway runs.",
    "/ping": "The same as /health, without a text.",
    "/metrics": "The figures of all services, for Prometheus.",
    "/version": "The version, and the URL of the broker.",
    "/load": "The number of requests that run.",
    "/openapi.json": "This document.",
    "/docs": "This document as a page.",
}
"""Answers to a GET of the other paths."""
ERROR_BODIES = (ErrorBody, AnthropicsErrorBody, OllamasErrorBody)
"""Bodies of errors."""
_REF = "#/components/schemas/{name}"
"""Template of the reference to a schema."""


@cache
def document() -> dict[str, Any]:
    """Returns the document."""
    refs, schemas = _components()
    paths: dict[str, Any] = {
        path: {"get": {"summary": text, "responses": {"200": {"description": text}, "503": {"description": text}}}}
        for path, text in GET_PATHS.items()
    }
    paths["/ping"]["post"] = paths["/ping"]["get"]
    paths["/v1/models"] = {"get": _operation("Lists the models.", refs[openai_shapes.ModelList], refs[ErrorBody])}
    model = _operation("Describes a model.", refs[openai_shapes.Model], refs[ErrorBody])
    model["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    paths["/v1/models/{model}"] = {"get": model}
    for path, route in ROUTES.items():
        operation = _operation(route.summary, refs[route.answer], refs[_error_of(path)])
        if route.stream_type:
            operation["responses"]["200"]["content"][route.stream_type] = {}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {row[0]: row[1] for row in fields(route)},
            "required": [field.encode_name for field in msgspec.structs.fields(route.request) if field.required],
        }
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagewire", "version": version("pagewire")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def fields(route: Route) -> list[tuple[str, dict[str, Any], str]]:
    """Returns name, schema and meaning of each field of a route's requests."""
    rows: dict[str, tuple[str, dict[str, Any], str]] = {}
    kinds = (LoadAdapterRequest, UnloadAdapterRequest, ChatCompletionRequest, GenerateRequest, SamplingParams)
    described = {name: text for kind in kinds for name, text in describe(kind).items()}
    passed = set(route.passed)
    names: dict[type[msgspec.Struct], set[str]] = {
        ChatCompletionRequest: passed,
        SamplingParams: _names(SamplingParams) if route.sampling else passed,
        route.request: _names(route.request),
    }
    for kind in dict.fromkeys((route.request, *names)):
        refs, schemas = _components()
        properties = schemas[refs[kind]["$ref"].rpartition("/")[2]]["properties"]
        texts = describe(kind)
        for field in msgspec.structs.fields(kind):
            if field.encode_name not in names[kind]:
                continue
            schema = dict(properties[field.encode_name])
            schema.pop("description", None)
            schema |= _bounds(field.name)
            text = " ".join((texts.get(field.name) or described.get(field.name) or MEANINGS[field.encode_name]).split())
            if not field.required:  # a null field counts as missing
                schema = _or_null(schema)
            rows.setdefault(field.encode_name, (field.encode_name, {**schema, "description": text}, text))
    return list(rows.values())


def _names(kind: type[msgspec.Struct]) -> set[str]:
    """Returns the names of the fields that a body may have."""
    return set(FIELDS) if kind is CompletionRequest else set(kind.__struct_encode_fields__)


@cache
def _components() -> tuple[dict[type[msgspec.Struct], dict[str, Any]], dict[str, Any]]:
    """Returns the reference to each struct's schema, and all schemas by name."""
    kinds = [kind for route in ROUTES.values() for kind in (route.request, route.answer)]
    more: list[type[msgspec.Struct]] = [SamplingParams, openai_shapes.Model, openai_shapes.ModelList, *ERROR_BODIES]
    structs = list(dict.fromkeys(kinds + more))
    refs, schemas = msgspec.json.schema_components(structs, ref_template=_REF)
    return dict(zip(structs, refs, strict=True)), schemas


def page() -> str:
    """Returns the document as a page that needs no other site."""
    parts = []
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            rows = ""
            body = operation.get("requestBody", {"content": {"application/json": {"schema": {"properties": {}}}}})
            for name, schema in body["content"]["application/json"]["schema"]["properties"].items():
                kind = escape(kind_of(schema))
                rows += f"<tr><td><code>{name}</code><td>{kind}<td>{escape(schema.get('description', ''))}"
            head = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
            parts.append(head + (f"<table>{rows}</table>" if rows else ""))
    style = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td{padding:.2em 1em .2em 0;vertical-align:top}"
    return f"<!doctype html><title>Pagewire</title><style>{style}</style><h1>Pagewire</h1>{''.join(parts)}"


def kind_of(schema: dict[str, Any]) -> str:
    """Returns the type of a field, in words."""
    if "anyOf" in schema:
        return " or ".join(kind for each in schema["anyOf"] if (kind := kind_of(each)) != "null")
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"] if value is not None)
    if "$ref" in schema:
        return "object"
    if schema.get("type") == "array":
        items = schema.get("items")
        return f"list of {kind_of(items)}" if isinstance(items, dict) and items else "list"
    return str(schema.get("type", "any"))


@cache
def _bounds(name: str) -> dict[str, float]:
    """Returns the bounds of a number in the terms of JSON Schema; they say nothing of what is no number."""
    for parameter in PARAMETERS:
        if parameter.name == name:
            above_0 = parameter.lowest == math.nextafter(0.0, 1.0)
            lowest = {"exclusiveMinimum": 0.0} if above_0 else {"minimum": parameter.lowest}
            return lowest | ({"maximum": parameter.highest} if math.isfinite(parameter.highest) else {})
    return {}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    kinds = schema["anyOf"]
    return schema if {"type": "null"} in kinds else {**schema, "anyOf": [*kinds, {"type": "null"}]}


def _error_of(path: str) -> type[msgspec.Struct]:
    if path.startswith(OLLAMA):
        return OllamasErrorBody
    return AnthropicsErrorBody if path.startswith(MESSAGES) else ErrorBody


def _operation(text: str, answer: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": text,
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}},
            "default": {"description": "An error.", "content": {"application/json": {"schema": error}}},
        },
    }
