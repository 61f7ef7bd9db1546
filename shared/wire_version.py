"""The version of the messages between services."""

WIRE_VERSION = 9
"""First byte of every message; raised whenever a peer of the previous version could misread one."""
