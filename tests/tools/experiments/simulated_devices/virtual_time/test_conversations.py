import statistics

from pagewire.bench._common.loads import sharegpt_lengths
from tools.experiments.simulated_devices.virtual_time.conversations import LONGEST, TURNS, Client


def test_a_prompt_repeats_the_conversation_and_adds_a_question() -> None:
    client = Client(0, seed=1, think=1.0)
    grown = 0
    prompt, answer = client.ask(0.0).prompt, [7, 8, 9]
    for _ in range(200):
        client.receive(answer)
        request = client.ask(5.0)
        assert request.at > 5.0
        assert len(request.prompt) + request.output <= LONGEST
        if request.prompt[: len(prompt) + 3] == prompt + answer:
            grown += 1
            assert len(request.prompt) > len(prompt) + 3
        prompt = request.prompt
    assert abs(grown / 200 - (1 - 1 / TURNS)) < 0.1


def test_clients_are_alike_and_not_the_same() -> None:
    def first(number: int) -> list[int]:
        return Client(number, seed=1, think=1.0).ask(0.0).prompt

    assert first(1) == first(1)
    assert first(1)[:4] != first(2)[:4]


def test_lengths_and_pauses_have_the_means_that_they_should() -> None:
    requests = [Client(i, seed=2, think=10.0).ask(0.0) for i in range(3000)]
    prompts = [prompt for prompt, _ in sharegpt_lengths()]
    assert abs(statistics.fmean(len(r.prompt) for r in requests) / statistics.fmean(prompts) - 1) < 0.1
    assert abs(statistics.fmean(r.at for r in requests) - 10.0) < 1.0
