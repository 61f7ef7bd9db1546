"""Generate texts for several prompts, without a running stack: python examples/offline_batch.py [MODEL]"""

import sys

from pagewire import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The house by the sea", "It was a dark night"]


def main() -> None:
    """Prints a sampled text for each prompt."""
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "") as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32)):
            print(f"{output.prompt!r} goes on: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
