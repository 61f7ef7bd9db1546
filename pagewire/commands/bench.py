"""Runs a benchmark.

Each benchmark is a module of `bench` with `main(arguments) -> int`. `pagewire bench NAME --help` shows its arguments.
"""

import argparse
import importlib
import pkgutil

import pagewire.bench as benchmarks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's name and its arguments."""
    names = sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name[0] != "_")
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the benchmark")


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark."""
    code: int = importlib.import_module(f"pagewire.bench.{arguments.name}").main(arguments.arguments)
    return code
