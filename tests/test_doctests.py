"""The calls that docstrings show."""

import doctest
from importlib import import_module

import pytest

MODULES = [
    "pagewire.bench._common.event_stream",
    "pagewire.client.sequencer",
    "pagewire.commands.chat.markdown",
    "pagewire.commands.status",
    "pagewire.embedded.programs",
    "pagewire.kernels.cpu.targets",
    "pagewire.kernels.triton.layers.split_inputs",
    "pagewire.services.detokenizer.text.stop_strings",
    "pagewire.services.detokenizer.text.text_decoder",
    "pagewire.services.executor.devices.edits",
    "pagewire.services.executor.devices.gathered_attention",
    "pagewire.services.executor.packed_columns",
    "pagewire.services.executor.replay_buffer",
    "pagewire.services.executor.sequence_key",
    "pagewire.services.gateway.answers.sse",
    "pagewire.services.gateway.http.declined_upgrade",
    "pagewire.services.gateway.http.origin",
    "pagewire.services.gateway.requests.anthropic_blocks",
    "pagewire.services.gateway.requests.api_elements",
    "pagewire.services.gateway.requests.chat_request",
    "pagewire.services.gateway.requests.responses_tools",
    "pagewire.services.scheduler.policy.adapter_admission",
    "pagewire.services.scheduler.policy.beam_search.ranking",
    "pagewire.services.scheduler.policy.block_pool",
    "pagewire.services.scheduler.policy.budget",
    "pagewire.services.scheduler.policy.prefix_cache",
    "pagewire.services.scheduler.policy.service_rate",
    "pagewire.services.scheduler.policy.suspects",
    "pagewire.services.scheduler.policy.waiting_queue",
    "pagewire.services.tokenizer.chat.format_recognition",
    "pagewire.services.tokenizer.chat.message_form",
    "pagewire.services.tokenizer.chat.template_probe",
    "pagewire.services.tokenizer.chat.text_tools",
    "pagewire.services.tokenizer.dispatch.admission",
    "pagewire.services.tokenizer.dispatch.replica_router",
    "pagewire.services.tokenizer.validation.json_schemas",
    "pagewire.services.tokenizer.validation.sampling_checks",
    "pagewire.shared.adapters.lora_modules",
    "pagewire.shared.block_tables",
    "pagewire.shared.bus.framing",
    "pagewire.shared.bus.memory",
    "pagewire.shared.chat.formats.pythonic",
    "pagewire.shared.chat.parser",
    "pagewire.shared.chat.reader",
    "pagewire.shared.chat.reasoning_length",
    "pagewire.shared.chat.typed_value",
    "pagewire.shared.client_protocol.client_requests",
    "pagewire.shared.errors",
    "pagewire.shared.messages.codec",
    "pagewire.shared.models.memory_need",
    "pagewire.shared.models.gguf.reader",
    "pagewire.shared.prefix_hashes",
    "pagewire.shared.process.listener",
    "pagewire.shared.rendezvous",
    "pagewire.shared.settings.config",
    "pagewire.shared.settings.environment",
    "pagewire.shared.settings.flags",
    "pagewire.shared.settings.spelling",
    "pagewire.shared.settings.vllm_flags",
    "pagewire.shared.splitfuse",
    "pagewire.shared.subjects",
]


@pytest.mark.parametrize("module", MODULES)
def test_every_call_in_a_docstring_has_the_result_beside_it(module: str) -> None:
    results = doctest.testmod(import_module(module))
    assert results.attempted
    assert not results.failed
