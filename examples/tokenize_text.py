"""Turn a text into tokens and back, beside `pagewire serve`: python examples/tokenize_text.py"""

from pagewire import Client

TEXT = "The quick brown fox jumps over the lazy dog."


def main() -> None:
    """Prints each token of a text with its id."""
    with Client() as client:
        token_ids = client.tokenize(TEXT)
        for token_id in token_ids:
            print(f"{token_id:6d} {client.detokenize([token_id])!r}")
        print(f"the text is the same: {client.detokenize(token_ids) == TEXT}")


if __name__ == "__main__":
    main()
