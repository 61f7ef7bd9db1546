"""The streams in which JetStream keeps work, the records of ended requests, and the number of the last term."""

from typing import Any

from pagewire.shared import subjects
from pagewire.shared.bus.protocol import DONE_AGE

WORK_STREAM = "PAGEWIRE_WORK"
DONE_STREAM = "PAGEWIRE_DONE"
TERM_STREAM = "PAGEWIRE_TERM"
ADAPTER_STREAM = "PAGEWIRE_ADAPTERS"
"""The store of adapters, which only executors with adapters create: `pagewire.shared.adapters.adapter_store`."""
CHECK_WORK = f"{subjects.WORK}.check"
"""Subject of the item that a check of the store writes. No queue has it: names of queues have three tokens."""
CHECK_DONE = f"{subjects.DONE}.$check"
"""Subject of the record that a check of the store writes. No request has it: ids have no `$`."""
CHECK_SIZE = 4096
"""Bytes that a check writes: a block of most disks, so that a full disk cannot hide in a half-empty block."""
WORK_LIMIT = 100_000
"""Maximum number of items in all queues. Further ones are refused, so that the disk does not fill up."""
DUPLICATE_WINDOW = 30.0
"""Seconds for which JetStream drops a message that it has stored already: nobody sends it again for longer."""
NANOSECONDS = 1_000_000_000

STREAMS: dict[str, dict[str, Any]] = {
    WORK_STREAM: {
        "subjects": [f"{subjects.WORK}.>"],
        "retention": "workqueue",
        "discard": "new",
        "max_msgs": WORK_LIMIT,
        "allow_direct": True,
        "allow_rollup_hdrs": True,
        "duplicate_window": int(DUPLICATE_WINDOW * NANOSECONDS),
    },
    DONE_STREAM: {
        "subjects": [f"{subjects.DONE}.*"],
        "max_age": int(DONE_AGE * NANOSECONDS),
        "max_msgs_per_subject": 1,
        "allow_direct": True,
    },
    TERM_STREAM: {"subjects": [subjects.TERM], "max_msgs": 1},
}
NUMBERS_PER_SECOND = {WORK_STREAM: 1_000_000, TERM_STREAM: 8}
"""Streams whose numbers must never occur again, also if somebody deletes the stream: they begin with the time at which
the stream is created, in these parts of a second. Nothing is stored faster for long. Terms fit into 32 bits."""
EPOCH = 1_735_689_600
"""Unix time from which on that time counts: the beginning of 2025."""

SHARES = {WORK_STREAM: 1 / 2, DONE_STREAM: 3 / 8, TERM_STREAM: 1 / 64}
"""Share of the storage that each stream may take. The rest is JetStream's own, so that no stream hinders another.

A full queue refuses work; the records of ended requests replace the oldest ones.
"""
