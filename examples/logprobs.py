"""Compare the likeliest tokens, then search with beams: python examples/logprobs.py [MODEL]"""

import sys

from pagewire import LLM, SamplingParams
from pagewire.sampling_params import BeamSearchParams

PROMPT = "Once upon a time"


def main() -> None:
    """Prints the three likeliest tokens at each position, and the three best beams."""
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "") as llm:
        greedy = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=5, logprobs=3))[0].outputs[0]
        for position in greedy.logprobs or []:
            likeliest = sorted(position.values(), key=lambda token: token.rank or 0)
            print(", ".join(f"{token.decoded_token!r} {token.logprob:.2f}" for token in likeliest))
        search = llm.beam_search(PROMPT, BeamSearchParams(beam_width=3, max_tokens=12))[0]
        for beam in search.sequences:
            print(f"beam {beam.cum_logprob:.2f}: {beam.text!r}")


if __name__ == "__main__":
    main()
