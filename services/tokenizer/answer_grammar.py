"""The grammar of the answers to a request: of the form that it asks for, of reasoning before it, and of calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.services.tokenizer.chat.format_recognition import Formats
from pagewire.services.tokenizer.chat.grammars.call_grammar import HELD, any_arguments, call_rule, free_rule, may_call
from pagewire.services.tokenizer.chat.grammars.reasoning_grammar import reasoning_grammar
from pagewire.services.tokenizer.chat.grammars.typed_calls import arguments_of, arguments_rule
from pagewire.services.tokenizer.chat.tool_grammar import call_schema, parameters_of
from pagewire.services.tokenizer.chat.tool_use import Progress, text_arguments
from pagewire.services.tokenizer.validation.grammar_checker import GrammarChecker
from pagewire.services.tokenizer.validation.sampling_checks import NOT_IN_GRAMMAR
from pagewire.shared.chat.formats import TYPED
from pagewire.shared.errors import InvalidRequest
from pagewire.shared.messages.client import ChatFormat, GenerateRequest, StructuredOutputsParams

Function = Mapping[str, Any]
"""A tool's `function`."""


async def answer_grammar(
    checker: GrammarChecker, formats: Formats, request: GenerateRequest, form: ChatFormat | None, progress: Progress
) -> str:
    """Returns the grammar of the answers, which can be compiled; empty: they are free.

    Args:
        checker: compiles grammars.
        formats: the model's formats.
        request: a checked request.
        form: the format of its answers; None: it is no conversation, or has neither tools nor reasoning.
        progress: how far the prompt takes the reasoning.

    Raises:
        InvalidRequest: the form, or the schema of a strict tool, cannot be compiled; the message says why.
    """
    structured, calls = request.sampling.structured_outputs, "" if form is None else form.tool_calls
    held = _held_functions(request, formats) if calls in HELD else []
    if structured is None and not held:
        return ""
    strict = [function for function in held if _is_strict(function)]
    try:
        return await _grammar(checker, formats, request, calls, progress, held)
    except InvalidRequest:
        if strict == held:
            raise
    return await _grammar(checker, formats, request, calls, progress, strict) if structured or strict else ""


def _held_functions(request: GenerateRequest, formats: Formats) -> list[Function]:
    """Returns the functions whose arguments follow their schemas where the model chooses to call them: all of them
    beside a requested form and where tools are texts of the prompt, otherwise those that are `strict`."""
    functions = [tool["function"] for tool in request.tools or ()]
    if request.sampling.beam_width or any(getattr(request.sampling, name) for name in NOT_IN_GRAMMAR):
        return []
    if request.sampling.structured_outputs is not None or formats.tools_as_text:
        return functions
    return [function for function in functions if _is_strict(function)]


async def _grammar(
    checker: GrammarChecker,
    formats: Formats,
    request: GenerateRequest,
    calls: str,
    progress: Progress,
    held: Sequence[Function],
) -> str:
    """Returns the grammar of answers whose calls have this format; the arguments of the functions `held` follow their
    schemas, except for those that are not strict and cannot be compiled."""
    structured = request.sampling.structured_outputs
    rules, parts = "", dict[str, str]()
    if may_call(calls):
        functions = [tool["function"] for tool in request.tools or ()]
        arguments = {function["name"]: any_arguments(calls) for function in functions}
        schemas: dict[str, str] = {}
        for index, function in enumerate(held):
            lark, more = await _arguments(checker, calls, function, f"arguments{index}", formats.token_ids)
            if lark:
                schemas[function["name"]] = lark
                parts |= more
        arguments |= schemas
        bare = ""
        if calls == "llama3_json" and structured is not None:
            known = [each if each["name"] in schemas else {"name": each["name"]} for each in functions]
            bare, parts = "@bare", {"bare": await checker.grammar(StructuredOutputsParams(json=call_schema(known)))}
        rules = call_rule(calls, arguments, formats.token_ids, bare)
    free = free_rule(calls, formats.token_ids) if structured is None else ""
    around = reasoning_grammar(formats.reasoning, progress, formats.token_ids, rules, free)
    return await checker.grammar(structured, around, parts)


async def _arguments(
    checker: GrammarChecker, calls: str, function: Function, name: str, token_ids: Mapping[str, int]
) -> tuple[str, dict[str, str]]:
    """Returns the Lark of the arguments of a function, and the grammars that it refers to, whose names begin with
    `name`; empty: its schema cannot be compiled, and need not be.

    Raises:
        InvalidRequest: its schema cannot be compiled, and the function is strict.
    """
    try:
        if calls not in TYPED:
            return f"@{name}", {name: await checker.grammar(StructuredOutputsParams(json=parameters_of(function)))}
        arguments = arguments_of(function, text_arguments(function))
        if arguments is None:
            raise InvalidRequest("its arguments cannot be written one by one")
        parts, written = {}, []
        for index, argument in enumerate(arguments):
            if not argument.is_text:
                parts[f"{name}_{index}"] = await checker.grammar(StructuredOutputsParams(json=argument.schema))
            written.append((argument, "" if argument.is_text else f"@{name}_{index}"))
        return arguments_rule(calls, written, token_ids), parts
    except InvalidRequest as error:
        if not _is_strict(function):
            return "", {}
        reason = error.message.partition(": ")[2] or error.message
        raise InvalidRequest(
            f"tools: the parameters of {function['name']} cannot be compiled, as strict demands: {reason}",
            field="tools",
        ) from error


def _is_strict(function: Function) -> bool:
    return function.get("strict") is True
