"""Treatment of the elements that each API defines: the decoders and docs/http.md read these tables.

An element that a client sends with every request, and that a local server cannot have, must not refuse a request whose
rest can be answered: agents send such elements always, and repeat whole conversations.
"""

from collections.abc import Mapping
from enum import StrEnum


class Treatment(StrEnum):
    """Treatment of an element of a request."""

    BUILT = "built"
    """It has its effect."""
    HINT = "ignored: a hint"
    """An answer without it is right, too."""
    LEFT_OUT = "left out: nothing here can do it"
    """It needs a service of the provider's; the header `pagewire-warning` names it, and the rest is answered."""
    REFUSED = "refused: the answer would be wrong"


BUILT, HINT, LEFT_OUT, REFUSED = Treatment.BUILT, Treatment.HINT, Treatment.LEFT_OUT, Treatment.REFUSED
Elements = Mapping[str, Treatment]
"""Treatments by the name of an element."""


def _each(treatment: Treatment, names: str) -> dict[str, Treatment]:
    return dict.fromkeys(names.split(), treatment)


CHAT_FIELDS: Elements = _each(
    HINT,
    """cache_prompt metadata moderation prediction prompt_cache_key prompt_cache_options prompt_cache_retention
    safety_identifier service_tier store stream_interval verbosity""",
) | _each(LEFT_OUT, "web_search_options")
"""Fields of OpenAI's chat completions and completions, and of other servers, without an effect."""

RESPONSES_FIELDS: Elements = (
    _each(
        HINT,
        """client_metadata context_management include max_tool_calls moderation prompt_cache_key prompt_cache_options
        prompt_cache_retention safety_identifier service_tier store stream_options top_logprobs truncation""",
    )
    | _each(LEFT_OUT, "access_programs background_options image")
    | _each(REFUSED, "background conversation previous_input_messages previous_response_id prompt")
)
"""Fields of OpenAI's responses that are no fields of `ResponsesRequest`."""
RESPONSES_TOOLS: Elements = _each(BUILT, "function custom namespace") | _each(
    LEFT_OUT,
    """apply_patch code_interpreter computer computer_use_preview file_search image_generation local_shell mcp
    programmatic_tool_calling shell tool_search web_search web_search_2025_08_26 web_search_preview
    web_search_preview_2025_03_11""",
)
"""Types of the tools of OpenAI's responses."""
RESPONSES_ITEMS: Elements = (
    _each(
        BUILT,
        """message reasoning function_call function_call_output custom_tool_call custom_tool_call_output
        local_shell_call local_shell_call_output shell_call shell_call_output apply_patch_call apply_patch_call_output
        tool_search_call tool_search_output additional_tools""",
    )
    | _each(
        LEFT_OUT,
        """code_interpreter_call compaction compaction_trigger computer_call computer_call_output configuration_update
        file_search_call image_generation_call mcp_approval_request mcp_approval_response mcp_call mcp_list_tools
        program program_output web_search_call""",
    )
    | _each(REFUSED, "item_reference")
)
"""Types of the items of the input of OpenAI's responses."""
RESPONSES_PARTS: Elements = _each(BUILT, "input_text output_text refusal text") | _each(
    REFUSED, "input_file input_image input_audio"
)
"""Types of the parts of a message's content in OpenAI's responses. In the output of a tool the refused ones become a
text that says that they are not shown."""

MESSAGES_FIELDS: Elements = _each(
    HINT,
    """betas billing_policy cache_control compaction container context_management diagnostics fallback_credit_token
    fallbacks inference_geo service_tier speed thread user_profile_id workspace_id""",
) | _each(LEFT_OUT, "mcp_servers")
"""Fields of Anthropic's messages that are no fields of `MessagesRequest`."""
MESSAGES_TOOLS: Elements = _each(BUILT, "custom bash memory text_editor") | _each(
    LEFT_OUT,
    """advisor browser_toolset code_execution computer computer_toolset mcp_toolset tool_search_tool_bm25
    tool_search_tool_regex web_fetch web_search""",
)
"""Types of Anthropic's tools, without the date of their version."""
MESSAGES_BLOCKS: Elements = (
    _each(BUILT, "text thinking tool_use tool_result document search_result")
    | _each(
        LEFT_OUT,
        """advisor_tool_result bash_code_execution_tool_result code_execution_tool_result compaction container_upload
        fallback mcp_tool_listing mcp_tool_result mcp_tool_use redacted_thinking server_tool_use
        text_editor_code_execution_tool_result tool_addition tool_removal tool_search_tool_result
        web_fetch_tool_result web_search_tool_result""",
    )
    | _each(REFUSED, "image")
)
"""Types of the blocks of Anthropic's messages. A document is refused unless it is text; in the result of a tool, blocks
without text become a text that says that they are not shown."""

OLLAMA_FIELDS: Elements = _each(HINT, "shift truncate") | _each(REFUSED, "context images suffix template")
"""Fields of Ollama's chats and generations that are no fields of `ollama_request.py`. An empty value is no refusal."""
OLLAMA_OPTIONS: Elements = (
    _each(
        BUILT,
        """frequency_penalty min_p num_predict presence_penalty repeat_penalty seed stop temperature top_k top_p""",
    )
    | _each(
        HINT,
        """draft_num_predict embedding_only f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_gqa
        num_keep num_thread numa penalize_newline repeat_last_n rope_frequency_base rope_frequency_scale use_mlock
        use_mmap vocab_only""",
    )
    | _each(LEFT_OUT, "mirostat mirostat_eta mirostat_tau tfs_z typical_p")
)
"""Options of Ollama's requests."""

TABLES: Mapping[str, Elements] = {
    "fields of completions and chats": CHAT_FIELDS,
    "fields of responses": RESPONSES_FIELDS,
    "tools of responses": RESPONSES_TOOLS,
    "items of responses": RESPONSES_ITEMS,
    "content of responses": RESPONSES_PARTS,
    "fields of messages": MESSAGES_FIELDS,
    "tools of messages": MESSAGES_TOOLS,
    "blocks of messages": MESSAGES_BLOCKS,
    "fields of Ollama's routes": OLLAMA_FIELDS,
    "options of Ollama's routes": OLLAMA_OPTIONS,
}
"""All tables."""


def names_of(elements: Elements, treatment: Treatment) -> frozenset[str]:
    """Returns the names of the elements with a treatment.

    >>> sorted(names_of(RESPONSES_PARTS, Treatment.BUILT))
    ['input_text', 'output_text', 'refusal', 'text']
    """
    return frozenset(name for name, each in elements.items() if each is treatment)
