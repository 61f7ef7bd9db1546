"""Scheduler to executor: changes to the batch, which take effect together before the next step."""

from pagewire.shared.messages.codec import Wire
from pagewire.shared.messages.work import Sampling
from pagewire.shared.settings.config import STEP_TOKENS


class AddSlot(Wire, frozen=True):
    """Adds a sequence in a slot."""

    slot: int
    """Row in the executor's tables, in [0, max_num_seqs)."""
    sequence: int
    """Id of the sequence in this term, which step outputs use."""
    tokens: bytes
    """Packed ids of the prompt and of the tokens generated before."""
    prompt_tokens: int
    """Number of `tokens` that belong to the prompt."""
    computed: int
    """Leading positions whose KV is in the blocks already; less than the number of tokens."""
    blocks: bytes
    """Packed block table: entry i holds positions [i * block_size, (i + 1) * block_size), in one block per group of
    layers. Entries that the window of a group has left behind are given back: their ids mean nothing."""
    limit: int
    """Positions that may be written."""
    sampling: Sampling
    """How tokens are sampled."""
    prompt_index: int
    """Index of the prompt in its request: part of the sampling counter."""
    choice_index: int
    """Index of the completion of that prompt: part of the sampling counter."""
    trace: str
    """`traceparent` that the executor's spans continue; empty: none."""
    reports_prompt: bool = False
    """Whether step outputs report the log-probabilities of the prompt, all of which is computed then."""
    adapter: str = ""
    """Hash of the adapter's content; empty: there is none."""
    cache_salt: str = ""
    """Only sequences with the same salt may be drafted for from each other's text: `WorkItem.cache_salt`."""


class Fork(Wire, frozen=True):
    """Adds a sequence in a slot as a fork of another one. Sampling parameters, stops and adapter are its source's."""

    slot: int
    """Row in the executor's tables, which may be one that the plan removes."""
    sequence: int
    """Id of the sequence in this term, which step outputs use."""
    source: int
    """Slot of the source before the plan."""
    computed: int
    """Leading positions shared with the source, whose KV is in the blocks already."""
    tokens: bytes
    """Packed ids that follow these positions, at least one."""
    blocks: bytes
    """Packed block table: the entries shared with the source, then the fork's own."""
    limit: int
    """Positions that may be written."""


class Plan(Wire, frozen=True):
    """Changes to the executor's tables, applied in this order: copies, removed, added, forks, blocks, limits, order."""

    term: int
    """Fencing token: plans of a term older than the executor's are ignored."""
    number: int
    """Consecutive within the term, from 1. A plan is applied only after its predecessor."""
    removed: bytes
    """Packed slots to free."""
    added: tuple[AddSlot, ...]
    """Sequences to add. They may use slots and blocks that `removed` freed."""
    blocks: bytes
    """Packed slots, each with the blocks of an entry, which are appended to the slot's block table in this order."""
    limits: bytes
    """Packed pairs (slot, limit)."""
    order: bytes
    """Packed slots in the order in which prompts are served, before all others; empty: unchanged."""
    budget: int
    """Tokens per step."""
    lease_until: int
    """The executor runs while it has run fewer steps than this in the term. Outputs without rows do not count as steps:
    otherwise the output that answers a plan after the lease has expired would use up the next lease, without end."""
    forks: tuple[Fork, ...] = ()
    """Forks to add. They may use slots and blocks that `removed` freed; their sources are read before that."""
    copies: bytes = b""
    """Packed pairs (source block, target block) of KV to copy first. No target is also a source."""


class Claim(Wire, frozen=True):
    """Request of a scheduler to own an executor that has no owner."""

    scheduler: str
    """Instance id of the scheduler."""
    term: int
    """New term, higher than all before; the executor drops all sequences."""
    model: str
    """Served name; an executor of another model declines."""


class Claimed(Wire, frozen=True):
    """Reply to a `Claim`."""

    executor: str
    """Instance id of the executor."""
    accepted: bool
    """False: the executor belongs to another live scheduler, or serves another model."""
    num_blocks: int
    """Number of KV blocks; their ids are in [0, num_blocks)."""
    block_size: int
    """Positions per block."""
    max_num_seqs: int
    """Number of slots."""
    max_model_len: int
    """Context length in tokens."""
    max_candidates: int = 0
    """Candidates that a row reports at most; 0: the device reports none and cannot do beam search."""
    max_step_tokens: int = 0
    """Tokens that a step may grow to without a configured budget; 0: steps do not grow."""
    step_tokens: int = STEP_TOKENS
    """Tokens of a step, at first, without a configured budget."""
    windows: bytes = bytes(4)
    """Packed, per group of layers: how many positions a query sees, its own included; 0: all. Groups that see all come
    first."""
    mixed_prompt_tokens: int = 0
    """Prompt tokens of a step that decodes sequences too, unless many prompts wait; 0: no such limit."""
    kept_term: int = 0
    """The last term whose plans have changed the blocks: they are as its step outputs have said; 0: they are not."""


class Replay(Wire, frozen=True):
    """Request to send the step outputs in [first, last] again, as far as the executor still has them."""

    term: int
    """Term of the steps."""
    first: int
    """First step missed."""
    last: int
    """Last step missed."""
