"""Scheduler to executor: what changed. A plan takes effect at the next step boundary, whole."""

from pagewire.shared.messages.codec import Wire
from pagewire.shared.messages.work import Sampling


class AddSlot(Wire, frozen=True):
    """A sequence takes a slot."""

    slot: int
    """Row in the executor's tables, in [0, max_num_seqs)."""
    sequence: int
    """Id within the term, as step outputs name it."""
    tokens: bytes
    """Packed ids of the prompt and of what was generated before."""
    prompt_tokens: int
    """How many of `tokens` are the prompt."""
    computed: int
    """Leading positions whose KV is in the blocks already. Less than the number of tokens."""
    blocks: bytes
    """Packed block ids; entry i holds positions [i * block_size, (i + 1) * block_size)."""
    limit: int
    """Positions that may be written."""
    sampling: Sampling
    """How its tokens are picked."""
    prompt_index: int
    """Which prompt of its request: part of the sampling counter."""
    choice_index: int
    """Which completion of that prompt: part of the sampling counter."""
    trace: str
    """`traceparent` that the executor's spans continue; empty: none."""


class Fork(Wire, frozen=True):
    """A sequence takes a slot and begins where another one stands. It is sampled and ends as its source would."""

    slot: int
    """Row in the executor's tables. Like that of an `AddSlot`, it may be one that the plan removes."""
    sequence: int
    """Id within the term, as step outputs name it."""
    source: int
    """Slot that it is forked from, as it was before the plan."""
    computed: int
    """Leading positions that it has in common with its source. Their KV is in its blocks already."""
    tokens: bytes
    """Packed ids that follow these positions, at least one."""
    blocks: bytes
    """Packed block ids: those that it shares with its source, then its own."""
    limit: int
    """Positions that may be written."""


class Plan(Wire, frozen=True):
    """A delta to the executor's tables. Order of effect: copies, removed, added, forks, blocks, limits, order. Forks
    read their sources before anything is removed."""

    term: int
    """Fences: a plan of an older term than the executor's is ignored."""
    number: int
    """Dense within the term, from 1. None is applied across a gap."""
    removed: bytes
    """Packed slots that end now."""
    added: tuple[AddSlot, ...]
    """Slots that begin now; they may reuse what `removed` freed."""
    blocks: bytes
    """Packed pairs (slot, block), appended to the slot's table in this order."""
    limits: bytes
    """Packed pairs (slot, limit)."""
    order: bytes
    """Packed slots in the order in which prompts are served, the others behind them; empty: unchanged."""
    budget: int
    """Tokens per step."""
    lease_until: int
    """The executor runs on its own while it has run fewer steps than this in the term. Answers without rows do not
    count: else a plan that meets a used-up lease would be answered by what uses up the next one, for ever."""
    forks: tuple[Fork, ...] = ()
    """Slots that begin now as a copy of another one; they may reuse what `removed` freed."""
    copies: bytes = b""
    """Packed pairs (source block, target block): content that is copied first. No target is a source."""


class Claim(Wire, frozen=True):
    """A scheduler asks a free executor to be its own."""

    scheduler: str
    """Instance that claims."""
    term: int
    """Higher than any before: it empties the executor."""
    model: str
    """Served name; an executor of another model declines."""


class Claimed(Wire, frozen=True):
    """Answer to a `Claim`."""

    executor: str
    """Instance that answers."""
    accepted: bool
    """False: it belongs to another scheduler that is alive, or serves another model."""
    num_blocks: int
    """Size of the KV pool. Block ids are in [0, num_blocks)."""
    block_size: int
    """Positions per block."""
    max_num_seqs: int
    """Slots."""
    max_model_len: int
    """Context, in tokens."""
    max_candidates: int = 0
    """Candidates that a row can report; 0: the device has none, so that there is no beam search."""
    max_step_tokens: int = 0
    """Tokens up to which a step may grow where no budget is set; 0: it does not."""


class Replay(Wire, frozen=True):
    """A reader missed steps: send again what the ring holds in [first, last]."""

    term: int
    """Of the steps wanted."""
    first: int
    """First step missed."""
    last: int
    """Last step missed."""
