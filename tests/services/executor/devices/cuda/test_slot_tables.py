"""Changes of tables reach the entries that they name, and no other."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.kernels.triton.sampling.sampling_columns import ALLOWED, BAD_WORDS, BIASED, CHECKED_STOP_IDS, PENALIZED
from pagewire.services.executor.devices.cuda.slot_tables import GpuSlots
from pagewire.services.executor.devices.cuda.step_columns import UPDATES, StepColumns
from pagewire.services.executor.devices.protocol import Edits, Int64
from pagewire.shared.sampling_parameters import record
from tests.services.executor.devices.cuda.twins import CAPACITY, SLOTS, runtime


def int64(*values: int) -> Int64:
    return np.array(values, np.int64)


def test_tables_do_not_overlap() -> None:
    tables = GpuSlots(CAPACITY, runtime().device)
    tables.memory.fill_(0)
    state, sampling = tables.state, tables.sampling
    views = [getattr(state, name) for name in state.__slots__] + [tables.checked_stop_ids, *sampling.columns.values()]
    views += [sampling.stop_ids, sampling.bias_ids, sampling.bias]
    for number, table in enumerate(views, 1):
        assert table.data_ptr() % 16 == tables.memory.data_ptr() % 16
        assert not table.count_nonzero()
        table.fill_(number)
    assert all(bool((table == number).all()) for number, table in enumerate(views, 1))


def test_an_added_sequence_is_in_every_table() -> None:
    where = runtime()
    tables, columns = GpuSlots(CAPACITY, where.device), StepColumns(where, SLOTS, depth=2)
    for stop_ids in (tuple(range(100, 130)), (5, 6)):
        sampling = record(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, key=2**64 - 3, min_length=11)
        changes = tables.added(3, [30, 31], sampling, stop_ids, None)
        places, values = (np.concatenate(parts) for parts in zip(*changes, strict=True))
        columns.send(int64(3), int64(1), tables.memory, places, values)
    row = tables.sampling
    assert tables.state.block_tables[3, :2].tolist() == [30, 31]
    written = {name: column[3].item() for name, column in row.columns.items()}
    assert (written["temperature"], written["top_p"], written["min_p"]) == (0.5, 0.25, 0.125)
    assert (written["top_k"], written["min_length"], written["key"], written["num_candidates"]) == (7, 11, -3, 0)
    assert row.stop_ids[3, :3].tolist() == [5, 6, -1]
    assert tables.checked_stop_ids[3, :3].tolist() == [5, 6, -1]
    assert int((row.stop_ids >= 0).sum()) == 2
    assert tables.checked_stop_ids.shape == (SLOTS, CHECKED_STOP_IDS)
    assert not tables.state.alive.any()
    assert not row.columns["temperature"][:3].any()


def test_edits_are_in_their_tables_until_a_sequence_without_any_has_the_slot() -> None:
    where = runtime()
    tables, columns = GpuSlots(CAPACITY, where.device), StepColumns(where, SLOTS, depth=2)
    tables.sampling.seen[2] = 9
    edits = Edits(
        bias_ids=np.array([7, 9]),
        biases=np.array([0.5, -2.0], np.float32),
        allowed_ids=np.array([0, 33]),
        bad_words=np.array([2, 5, 6, 1, 8]),
        penalized=True,
        num_prompt_tokens=2,
        tokens=np.array([4, 5, 5, 5]),
    )
    kinds = []
    for slot_edits in (edits, None):
        changes = tables.added(2, [30], record(repetition_penalty=1.5), [3], slot_edits)
        places, values = (np.concatenate(parts) for parts in zip(*changes, strict=True))
        columns.send(int64(2), int64(1), tables.memory, places, values)
        kinds.append(int(tables.sampling.edits[2]))
    sampling = tables.sampling
    assert kinds == [ALLOWED | BIASED | PENALIZED | BAD_WORDS, 0]
    assert sampling.bias_ids[2, :3].tolist() == [7, 9, -1]
    assert sampling.bias[2, :2].tolist() == [0.5, -2.0]
    assert sampling.allowed[2, :3].tolist() == [1, 2, 0]
    assert sampling.seen[2].nonzero().flatten().tolist() == [4, 5]
    assert sampling.seen[2, 4:6].tolist() == [1, 5]
    assert sampling.bad_words[2, :3].tolist() == [5, 6, 8]
    assert sampling.bad_word_ends[2, :3].tolist() == [2, 3, 0]
    assert int(sampling.num_prompt_tokens[2]) == 2


@settings(max_examples=5, deadline=None)
@given(query_lens=st.lists(st.integers(1, 9), min_size=1, max_size=SLOTS), seed=st.integers(0, 99))
def test_rows_are_padded_with_empty_ones(query_lens: list[int], seed: int) -> None:
    columns = StepColumns(runtime(), SLOTS, depth=1)
    slots = np.random.default_rng(seed).permutation(SLOTS)[: len(query_lens)]
    table = torch.zeros(8, dtype=torch.int32, device=columns.slots.device)
    for _ in range(2):
        columns.send(slots, np.array(query_lens), table, int64(3), np.array([seed], np.int32))
    assert columns.slots[: len(query_lens)].tolist() == slots.tolist()
    assert columns.cu_queries.diff().tolist() == query_lens + [0] * (SLOTS - len(query_lens))
    assert columns.cu_queries[0] == 0
    assert table.tolist() == [0, 0, 0, seed, 0, 0, 0, 0]


def test_more_changes_than_one_copy_takes_are_all_made() -> None:
    columns = StepColumns(runtime(), SLOTS, depth=2)
    count = 2 * UPDATES + 5
    table = torch.zeros(count + 1, dtype=torch.int32, device=columns.slots.device)
    columns.send(int64(1), int64(4), table, np.arange(count), np.arange(count, dtype=np.int32))
    assert table[:-1].tolist() == list(range(count))
    assert table[-1] == 0
    assert columns.cu_queries.tolist() == [0] + [4] * SLOTS


def test_a_change_outside_a_row_stays() -> None:
    tables = GpuSlots(CAPACITY, runtime().device)
    change = tables.places("seen", int64(1, 2, 2, 3), int64(4, 0, 5, 4)), np.array([7, 8, 9, 10], np.int32)
    places, values = tables.outside("seen", 2, change)
    assert values.tolist() == [7, 10]
    assert places.tolist() == tables.places("seen", int64(1, 3), int64(4, 4)).tolist()
