"""Prints a configuration for a NATS server of your own: a user for each service, for clients, and for each tenant.

The passwords of the services come from the environment of the server; the keys of the tenants stand in the output.
"""

import argparse

from pagewire.embedded import broker_config
from pagewire.shared.security.api_keys import ApiKeys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the file of the tenants' keys."""
    parser.add_argument("--api-key-file", metavar="FILE", help="file with one tenant per line, name:key")


def run(arguments: argparse.Namespace) -> int:
    """Prints the configuration."""
    tenants = ApiKeys.load(arguments.api_key_file).passwords if arguments.api_key_file else {}
    print(broker_config.file(tenants), end="")
    return 0
