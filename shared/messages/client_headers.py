"""Headers of the messages between clients and services."""

FRESH = "Pagewire-Fresh"
"""Header of a generate request that is sent for the first time, with a random id: no earlier one is looked for."""
LEAVES = "Pagewire-Leaves"
"""Header of a message to the subject that cancels a request: the inbox of a client that leaves. The request goes on for
its other clients, and for a while without one."""
BATCH_INBOX = "Pagewire-Batch-Inbox"
"""Header of a generate request: another inbox of its connection, to which deltas may be sent as `DeltaBatch`."""
REFUSED = "Pagewire-Refused"
"""Header of an error frame that answers one message alone: the request that was sent before with this id goes on."""
