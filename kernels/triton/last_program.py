"""Finds out which of several programs ends last, so that it can join what all of them have written.

The result does not depend on which one that is, as long as it joins the parts in a fixed order.
"""

import triton.language as tl

from pagewire.kernels.triton.jit import jit


@jit
def is_last_program(counter: tl.tensor, programs: tl.tensor):  # type: ignore[no-untyped-def]
    """Returns whether this is the last of `programs` programs that call it with `counter`, an int32 that is 0 before.

    The last one sees what the others have written, if it does not read it from the first-level cache (`.cg`), and sets
    the counter back to 0.
    """
    tl.debug_barrier()  # all threads of the program have written
    last = tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter, 0)
    return last
