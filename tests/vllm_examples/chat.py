"""vLLM's example of offline chat."""

import sys

from pagewire import LLM
from pagewire.outputs import RequestOutput


def print_outputs(outputs: list[RequestOutput]) -> None:
    print("\nGenerated Outputs:\n" + "-" * 80)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}\n")
        print(f"Generated text: {generated_text!r}")
        print("-" * 80)


def main() -> None:
    llm = LLM(model=sys.argv[1])
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 16
    sampling_params.temperature = 0.5
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    print_outputs(outputs)
    conversations = [conversation for _ in range(3)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True)
    print_outputs(outputs)


if __name__ == "__main__":
    main()
