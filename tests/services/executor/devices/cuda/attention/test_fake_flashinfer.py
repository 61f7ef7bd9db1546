"""The stand-in for FlashInfer has its signatures, and refuses what it refuses."""

import ast
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

from pagewire.services.executor.devices.cuda.attention.flashinfer_limits import HEAD_SIZES
from tests.services.executor.devices.cuda.attention import fake_flashinfer
from tests.services.executor.devices.cuda.attention.fake_flashinfer import (
    BatchPrefillWithPagedKVCacheWrapper as Wrapper,
)

WHEEL = f"flashinfer-python=={fake_flashinfer.VERSION}"
METHODS = ("__init__", "reset_workspace_buffer", "workspace_size", "plan", "run")
HEADS: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "page_size": 4}
BF16 = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def scratch() -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8)


def plan(wrapper: Wrapper, *lengths: int, **more: Any) -> None:
    """The rows have one query each, and their keys begin in page 0."""
    pages = [-(-length // 4) for length in lengths]
    starts = int32(0, *torch.tensor(pages).cumsum(0).tolist())
    arguments = {
        "qo_indptr": torch.arange(len(lengths) + 1, dtype=torch.int32),
        "paged_kv_indptr": starts,
        "paged_kv_indices": torch.arange(int(starts[-1]), dtype=torch.int32),
        "paged_kv_last_page_len": int32(
            *(length - 4 * (count - 1) for length, count in zip(lengths, pages, strict=True))
        ),
        "seq_lens": int32(*lengths),
        "causal": True,
    }
    wrapper.plan(**{**arguments, **HEADS, **BF16, **more})


def run(wrapper: Wrapper, queries: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    cache = torch.randn(3, 2, 4, 64).to(dtype)
    query = torch.randn(queries, 4, 64).to(dtype)
    return wrapper.run(query, (cache, cache), out=torch.empty_like(query))


def captured(rows: int) -> Wrapper:
    return Wrapper(
        scratch(),
        "HND",
        use_cuda_graph=True,
        qo_indptr_buf=torch.zeros(rows + 1, dtype=torch.int32),
        paged_kv_indptr_buf=torch.zeros(rows + 1, dtype=torch.int32),
        paged_kv_indices_buf=torch.zeros(3, dtype=torch.int32),
        paged_kv_last_page_len_buf=torch.zeros(rows, dtype=torch.int32),
        backend="fa2",
    )


def test_a_planned_step_runs() -> None:
    wrapper = Wrapper(scratch(), "HND", backend="fa2")
    with pytest.raises(AssertionError, match="not initialized"):
        run(wrapper, 2)
    plan(wrapper, 3, 8)
    assert run(wrapper, 2).isfinite().all()
    with pytest.raises(ValueError, match="does not match"):
        run(wrapper, 3)
    with pytest.raises(ValueError, match="dtype"):
        run(wrapper, 2, torch.float16)


@pytest.mark.parametrize(
    "more",
    [
        {"paged_kv_last_page_len": int32(5, 4)},
        {"paged_kv_last_page_len": int32(0, 4)},
        {"seq_lens": int32(3, 9)},
        {"seq_lens": None},
        {"qo_indptr": torch.arange(3)},
        {"paged_kv_indices": torch.arange(5, dtype=torch.int32)},
        {"num_kv_heads": 3},
    ],
)
def test_other_rows_than_documented_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        plan(Wrapper(scratch(), "HND", backend="fa2"), 3, 8, **more)


def test_float32_is_refused() -> None:
    with pytest.raises(KeyError):
        plan(Wrapper(scratch(), "HND", backend="fa2"), 3, q_data_type=torch.float32)


def test_a_graph_has_one_shape() -> None:
    wrapper = captured(2)
    plan(wrapper, 3, 8)
    with pytest.raises(ValueError, match="batch size"):
        plan(wrapper, 3)
    with pytest.raises(ValueError, match="exceeds"):
        plan(wrapper, 8, 8)
    wrapper.reset_workspace_buffer(scratch(), torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="Failed to allocate"):
        plan(wrapper, 3, 8)


def test_two_plans_in_the_same_memory_are_noticed() -> None:
    first, second, shared = captured(2), captured(2), torch.zeros(100, dtype=torch.uint8)
    for wrapper in (first, second):
        wrapper.reset_workspace_buffer(scratch(), shared)
    plan(first, 3, 8)
    plan(second, 4, 4)
    with pytest.raises(AssertionError, match="of another plan"):
        run(first, 2)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flashinfer")
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    download = subprocess.run(
        [*pip, "--no-deps", "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False
    )
    if "connection broken" in download.stderr:
        pytest.skip("no package index can be reached")
    assert download.returncode == 0, download.stderr
    (path,) = folder.glob("*.whl")
    return path


def source(wheel: Path, name: str) -> ast.Module:
    with ZipFile(wheel) as archive:
        return ast.parse(archive.read(f"flashinfer/{name}"))


def shown(function: ast.FunctionDef) -> list[tuple[str, str, str]]:
    """The name, kind and default of each parameter."""
    arguments = function.args
    ordered = [*arguments.posonlyargs, *arguments.args]
    defaults = [""] * (len(ordered) - len(arguments.defaults)) + [
        ast.unparse(default) for default in arguments.defaults
    ]
    parameters = [(each.arg, "positional", default) for each, default in zip(ordered, defaults, strict=True)]
    parameters += [(arguments.vararg.arg, "rest", "")] if arguments.vararg else []
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append((each.arg, "keyword", "" if default is None else ast.unparse(default)))
    return parameters + ([(arguments.kwarg.arg, "more", "")] if arguments.kwarg else [])


def signatures(tree: ast.AST) -> dict[str, list[tuple[str, str, str]]]:
    """The parameters of the wrapper's methods, of overloaded ones the last."""
    kinds = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == Wrapper.__name__]
    return {node.name: shown(node) for node in kinds[0].body if isinstance(node, ast.FunctionDef)}


@pytest.mark.full
def test_the_fakes_signatures_equal_flashinfers(wheel: Path) -> None:
    theirs = signatures(source(wheel, "prefill.py"))
    ours = signatures(ast.parse(textwrap.dedent(inspect.getsource(Wrapper))))
    assert {name: ours[name] for name in METHODS} == {name: theirs[name] for name in METHODS}
    names = [
        alias.asname
        for node in ast.walk(source(wheel, "__init__.py"))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert {Wrapper.__name__, "__version__"} <= set(names)


@pytest.mark.full
def test_head_sizes_equal_the_sizes_that_flashinfer_compiles(wheel: Path) -> None:
    tables = [node for node in ast.walk(source(wheel, "aot.py")) if isinstance(node, ast.Dict)]
    lists = [
        ast.literal_eval(value)
        for table in tables
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "fa2_head_dim"
    ]
    assert lists == [[(size, size) for size in HEAD_SIZES]]
