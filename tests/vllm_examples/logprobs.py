"""Log-probabilities as vLLM's users read them."""

import sys

from pagewire import LLM, SamplingParams


def main() -> None:
    llm = LLM(model=sys.argv[1])
    sampling_params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    for output in llm.generate(["Hello, my name is"], sampling_params):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert position is not None
            logprob = position[token_id]
            print(f"{logprob.decoded_token!r}: {logprob.logprob:.3f}, rank {logprob.rank}")
        completion = output.outputs[0]
        assert completion.logprobs is not None
        for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
            print(f"{position[token_id].decoded_token!r}: {position[token_id].logprob:.3f}")
        print(f"cumulative: {completion.cumulative_logprob:.3f}")


if __name__ == "__main__":
    main()
