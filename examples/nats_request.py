"""Generate with nothing but nats-py, beside `pagewire serve`: python examples/nats_request.py

PAGEWIRE_NATS_URL leads to a broker that is not on this machine's port 4222.
"""

import asyncio
import json
import os

import nats


async def main() -> None:
    """Asks which models are served, and the first one for a text."""
    connection = await nats.connect(os.environ.get("PAGEWIRE_NATS_URL", "nats://127.0.0.1:4222"))
    models = json.loads((await connection.request("pagewire.v1.models", b"{}")).data)["models"]
    body = json.dumps({"prompt": "Once upon a time", "sampling": {"max_tokens": 32}}).encode()
    reply = await connection.request(models[0]["subject"], body, timeout=60)
    print(json.loads(reply.data)["choices"][0]["text"])
    await connection.close()


if __name__ == "__main__":
    asyncio.run(main())
