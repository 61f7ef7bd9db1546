"""Without a GPU the kernels run under Triton's interpreter, which must be chosen before the kernels are imported."""

import tests.kernels.conftest  # noqa: F401
