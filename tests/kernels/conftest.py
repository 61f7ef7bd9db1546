"""Without a GPU the kernels run under Triton's interpreter, which must be chosen before Triton is imported.

On a machine with a GPU the same tests run compiled, and carry the mark `cuda`.
"""

import os
import sys
from typing import Any

import numpy as np
import pytest
import torch

HERE = os.path.dirname(__file__)


def teach_bfloat16_products() -> None:
    """The interpreter holds bfloat16 as its bits, and its `dot` multiplies those: give it the numbers."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def teach_fp8_rounding() -> None:
    """The interpreter's conversion to eight bits loses the carry when it rounds: give it PyTorch's."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return plain(data, source, target, mode)
        return torch.from_numpy(data.view(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert


if not torch.cuda.is_available():
    if os.environ.get("TRITON_INTERPRET") != "1":  # else the shell has chosen it, or the process that began this one
        os.environ["TRITON_INTERPRET"] = "1"
        # PyTorch and transformers may have imported Triton as a compiler in a shared session: begin again.
        for name in [name for name in sys.modules if name.split(".")[0] in {"triton", "kernels"}]:
            if not name.startswith(("triton._C", "pagewire.kernels.cpu")):
                del sys.modules[name]
    teach_bfloat16_products()
    teach_fp8_rounding()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if str(item.path).startswith(HERE):
                item.add_marker(pytest.mark.cuda)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
