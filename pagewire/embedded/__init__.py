"""The stack on one machine: the NATS server and every service as processes under a supervisor."""
