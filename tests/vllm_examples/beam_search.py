"""vLLM's example of beam search."""

import sys

from pagewire import LLM
from pagewire.sampling_params import BeamSearchParams


def main() -> None:
    llm = LLM(model=sys.argv[1])
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    prompts = [{"prompt": "Hello, my name is"}, {"prompt": "The capital of France is"}]
    for output in llm.beam_search(prompts, params):
        for sequence in output.sequences:
            print(f"{sequence.cum_logprob:.3f}: {sequence.text!r} ({len(sequence.tokens)} tokens)")


if __name__ == "__main__":
    main()
