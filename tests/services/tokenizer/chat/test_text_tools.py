import json
from collections.abc import Callable

from pagewire import read_message
from pagewire.services.tokenizer.chat.chat_template import ChatTemplate, Conversation
from pagewire.services.tokenizer.chat.environment import chat_environment
from pagewire.services.tokenizer.chat.grammars.call_grammar import ANY_ARGUMENTS, call_rule, free_rule
from pagewire.services.tokenizer.chat.grammars.reasoning_grammar import reasoning_grammar
from pagewire.services.tokenizer.chat.text_tools import with_text_tools
from pagewire.services.tokenizer.chat.tool_grammar import parameters_of
from pagewire.services.tokenizer.chat.tool_use import Progress
from pagewire.services.tokenizer.validation.grammar_checker import grammar_of
from pagewire.shared.chat.parser import Call, Message
from pagewire.shared.grammar_compiler import GrammarCompiler
from pagewire.shared.messages.client import ChatFormat, StructuredOutputsParams
from pagewire.shared.models.model_folder import BUNDLED
from pagewire.shared.models.tokenizer_files import load_tokenizer
from tests.services.tokenizer.chat.conversations import ANSWER, CALL, QUESTION, WEATHER, parts, said
from tests.support.model_folders import TEMPLATES


def test_a_call_in_the_history_is_written_as_the_parser_reads_it() -> None:
    message = said("assistant", "Wait.", tool_calls=[CALL, CALL])
    (turn,) = with_text_tools([message], [])
    assert "tool_calls" not in turn
    arguments = json.dumps(CALL["function"]["arguments"])  # type: ignore[index]
    call = Call("get_weather", arguments)
    assert read_message(turn["content"], ChatFormat("hermes")) == Message("Wait.", None, [call, call])


def test_tools_are_described_in_the_system_message() -> None:
    for system in ([], [said("system", "Be brief.")], [said("developer", parts("Be", "brief."))]):
        first, second = with_text_tools([*system, QUESTION], [WEATHER])
        assert json.dumps(WEATHER["function"], ensure_ascii=False) in first["content"]
        assert first["content"].startswith("Be" if system else "# Tools")
        assert second == QUESTION
    assert with_text_tools([QUESTION], []) == [QUESTION]


def test_results_in_a_row_are_one_turn_of_the_user() -> None:
    messages = with_text_tools(
        [said("tool", parts("a", "b")), ANSWER, said("assistant", "Hi."), said("tool", None)], []
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"].count("<tool_response>") == 2
    assert "a\nb" in messages[0]["content"]


def test_a_template_without_tools_gets_texts_only_where_they_are_asked_for() -> None:
    source = (TEMPLATES / "Qwen-Qwen2.5-7B-Instruct.jinja").read_text()
    template = ChatTemplate(chat_environment(), source, {})
    template.rules = template.probe()
    messages = [QUESTION, said("assistant", None, tool_calls=[CALL]), ANSWER]
    native = template.render(Conversation(messages, tools=[WEATHER]))
    assert "# Tools" in native
    as_text = template.render(Conversation(messages, tools=[WEATHER], tools_as_text=True))
    assert as_text.count("You can call functions.") == 1
    assert "You may call one or more functions" not in as_text
    assert template.render(Conversation([QUESTION], tools_as_text=True)) == template.render(Conversation([QUESTION]))


def takes(text: str, around: Callable[[str, str], str] = "start: free\n{}{}".format) -> bool:
    """Whether an answer that may call tools may begin with a text."""
    tokenizer = load_tokenizer(BUNDLED).backend
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.get_vocab_size(), [0])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    arguments = grammar_of(StructuredOutputsParams(json=parameters_of(WEATHER["function"])))  # type: ignore[arg-type]
    call = call_rule("hermes", {"get_weather": "@weather", 'a"b': ANY_ARGUMENTS}, {})
    grammar = grammar_of(None, prefix=around(call, free_rule("hermes", {})), parts={"weather": arguments})
    matcher = compiler.compile(grammar)
    return matcher.try_consume_tokens(ids) == len(ids)


def test_the_grammar_holds_a_call_once_it_is_begun() -> None:
    begin = '<tool_call>\n{"name": "get_weather", "arguments": '
    assert takes("It is warm. 1 < 2 {} <tool>")
    assert takes(f'Wait. {begin}{{"city": "Paris"}}}}\n</tool_call> And {begin}{{"city": "Rome", "days": 2}}}}')
    assert takes('<tool_call>\n{"name": "a\\"b", "arguments": {"x": 1}}\n</tool_call>')
    assert not takes('<tool_call>\n{"name": "get_wether"')
    assert not takes(f'{begin}{{"city": 1')
    assert not takes(f'{begin}{{"days": 1}}')


def test_reasoning_before_a_call_is_free() -> None:
    def around(call: str, free: str) -> str:
        return reasoning_grammar("think", Progress.BEGUN, {}, call, free)

    assert takes('I could <tool_call> x.</think>\n\n<tool_call>\n{"name": "get_weather"', around)
    assert not takes('I could <tool_call> x.</think>\n\n<tool_call>\n{"name": "get_wether"', around)
