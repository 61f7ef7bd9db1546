"""Ranks other than 0 know which rows have grammars, and not which."""

import io
import pickle

import numpy as np

from pagewire.services.executor.devices.cuda.ranks.device_calls import MASKS, FollowingMasks, with_grammar
from pagewire.services.executor.devices.protocol import Capacity, Edits

CAPACITY = Capacity(8, 16, max_num_seqs=4, max_model_len=32, vocab_size=64)


def test_masks_of_drafts_are_those_of_rank_0_and_leave_nothing_behind() -> None:
    sent = [np.array([[place, 7]], np.uint32) for place in range(3)]
    masks = FollowingMasks(CAPACITY, io.BytesIO(b"".join(pickle.dumps((MASKS, (mask,))) for mask in sent)))
    none = np.empty(0, np.int64)
    without = Edits(none, np.empty(0, np.float32), none, none, penalized=False, num_prompt_tokens=1)
    edits = with_grammar(without, structured=True)
    assert edits is not None
    assert edits.grammar is not None
    masks.add(1, edits.grammar)
    assert masks.active.tolist() == [False, True, False, False]
    np.testing.assert_array_equal(masks.along(np.array([1]), [[5, 6]]), np.concatenate(sent))
    assert not edits.grammar._new
    masks.add(1, None)
    assert not masks.active.any()
    masks.close()
