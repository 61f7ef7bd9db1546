"""vLLM's example of prefix caching: the same texts with and without it."""

import sys

from pagewire import LLM, SamplingParams

prefix = (
    "You are an expert school principal, skilled in effectively managing "
    "faculty and staff. Draft 10-15 questions for a potential first grade "
    "Head Teacher for my K-12, all-girls', independent school that emphasizes "
    "community, joyful discovery, and life-long learning. The candidate is "
    "coming in for a first-round panel interview for a 8th grade Math "
    "teaching role. They have 5 years of previous teaching experience "
    "as an assistant teacher at a co-ed, public school with experience "
    "in middle school math teaching. Based on these information, fulfill "
    "the following paragraph: "
)
prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)


def main() -> None:
    regular_llm = LLM(model=sys.argv[1], enable_prefix_caching=False, gpu_memory_utilization=0.4)
    regular_generated_texts = [
        output.outputs[0].text for output in regular_llm.generate(generating_prompts, sampling_params)
    ]
    del regular_llm
    prefix_cached_llm = LLM(model=sys.argv[1], enable_prefix_caching=True, gpu_memory_utilization=0.4)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)  # warm-up, so that the prefix is computed
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    cached_generated_texts = [output.outputs[0].text for output in outputs]
    assert all(output.num_cached_tokens for output in outputs)
    print(f"Generated answers are the same: {regular_generated_texts == cached_generated_texts}")


if __name__ == "__main__":
    main()
