"""Trains, exports and measures the bundled model: `python -m tools.bundled_model train --help`."""

import argparse
import math
import sys
from collections.abc import Sequence

from pagewire.shared.models.model_folder import BUNDLED
from tools.bundled_model.export import export
from tools.bundled_model.measure import evaluate
from tools.bundled_model.train import train


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_model", description="The bundled model.")
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("train", help="train a model")
    command.set_defaults(call=train)
    command.add_argument("--run-dir", required=True, help="folder of the tokenizer and the checkpoint")
    command.add_argument("--steps", type=int, default=912)
    command.add_argument("--minutes", type=float, default=math.inf, help="end after this time, if steps remain")
    command.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    command.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 512, 512, 512, 2048], help="row lengths, drawn step by step"
    )
    command.add_argument("--lr", type=float, default=4e-3, help="highest learning rate")
    command.add_argument("--weight-decay", type=float, default=0.5)
    command.add_argument("--dropout", type=float, default=0.1)
    command.add_argument("--vocab-size", type=int, default=3072)
    command.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--seed", type=int, default=1)

    command = commands.add_parser("export", help="write a Hugging Face folder")
    command.set_defaults(call=export)
    command.add_argument("--run-dir", required=True)
    command.add_argument("--out", default=BUNDLED)

    command = commands.add_parser("evaluate", help="measure held-out bits per byte")
    command.set_defaults(call=evaluate)
    command.add_argument("--model", default=BUNDLED)
    command.add_argument("--window", type=int, default=1024, help="tokens the model sees at once")
    command.add_argument("--stride", type=int, default=512, help="tokens between two windows")
    command.add_argument("--threads", type=int, default=2)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    args.call(args)


if __name__ == "__main__":
    main()
