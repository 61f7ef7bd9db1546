"""The stack on one machine: the NATS server, every service as a process, and what keeps them running."""
