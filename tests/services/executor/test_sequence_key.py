"""The random key of a sequence never changes, and no two sequences of a request share one."""

from pagewire.services.executor.sequence_key import sequence_key


def test_keys_differ_by_seed_prompt_and_choice() -> None:
    keys = {
        sequence_key(seed, prompt, choice) for seed in (0, 1, 2**64 - 1) for prompt in range(20) for choice in range(20)
    }
    assert len(keys) == 3 * 20 * 20
    assert all(0 <= key < 2**64 for key in keys)


def test_a_key_is_the_same_in_every_release() -> None:
    assert sequence_key(1, 2, 3) == 0xD0734750FDE362B3
