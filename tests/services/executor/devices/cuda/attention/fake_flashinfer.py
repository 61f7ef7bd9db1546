"""A stand-in for the module `flashinfer`: the signatures of 0.7.2, what its source refuses, and attention in PyTorch.

The host's part is as documented: `plan` reads tensors of the host, and writes its result to pinned memory, from which
the device copies it later. A step reads what is on the device: the copies, and the lists of pages as they are by then.
What the real wrapper would silently do otherwise than asked is refused here.

Memory of the device is on torch's meta device where there is none, and then nothing is computed.
"""

from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "0.7.2.post1"
PINNED = 8 << 20
"""Bytes of the plan's memory unless it is reset, and of its copy on the host."""
HALF = {torch.float16, torch.bfloat16}
STORED = HALF | {torch.float8_e4m3fn, torch.float8_e5m2}


class BatchPrefillWithPagedKVCacheWrapper:
    """The wrapper for rows of any number of queries, with the kernels `fa2`."""

    float32 = False
    """Whether float32 is taken too, so that tokens can be compared exactly. FlashInfer has no such kernels."""
    num_created = 0
    """Wrappers of a module."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert kv_layout == "HND", "the only layout of these tests"
        assert backend == "fa2", "the only kernels of these tests"
        unused: tuple[object, ...] = (custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs, variant_owns_mask or None)
        assert unused == (None,) * 5, "no test uses them"
        self.device = float_workspace_buffer.device
        self._graph = use_cuda_graph
        self._buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if use_cuda_graph:
            for buffer in self._buffers:
                if buffer is None or buffer.device != self.device:
                    raise ValueError("each buffer should be a torch.Tensor in CUDA graph mode")
                assert buffer.dtype == torch.int32
            assert qo_indptr_buf is not None
            assert paged_kv_indptr_buf is not None
            assert paged_kv_last_page_len_buf is not None
            self._fixed_rows = len(qo_indptr_buf) - 1
            if len(paged_kv_indptr_buf) != self._fixed_rows + 1 or len(paged_kv_last_page_len_buf) != self._fixed_rows:
                raise ValueError("The length of a buffer does not follow from batch_size.")
        self._most_tokens: int | None = None
        self.reset_workspace_buffer(float_workspace_buffer, torch.empty(PINNED, dtype=torch.uint8, device=self.device))
        type(self).num_created += 1

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            assert buffer.dtype == torch.uint8
            assert buffer.device == self.device
        self._scratch, self._plan = float_workspace_buffer, int_workspace_buffer
        self._pinned = torch.empty(len(int_workspace_buffer), dtype=torch.uint8)
        self._arguments: dict[str, Any] | None = None

    def workspace_size(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> tuple[int, int]:
        tokens = int(qo_indptr[-1])
        return 4 * tokens * num_qo_heads * (head_dim_qk + 1), 4 * 2 * len(qo_indptr)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        assert non_blocking
        assert seq_lens is not None, "FlashInfer would copy the lengths from pageable memory"
        host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
        for tensor in (*host, paged_kv_indices):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
        assert {tensor.device.type for tensor in host} == {"cpu"}, "FlashInfer would wait for a copy to the host"
        assert paged_kv_indices.device == self.device, "FlashInfer would copy from pageable memory"
        rows, tokens = len(qo_indptr) - 1, int(qo_indptr[-1])
        for indptr in (qo_indptr, paged_kv_indptr):
            assert indptr.shape == (rows + 1,)
            assert indptr[0] == 0
            if (indptr.diff() < 0).any():
                raise RuntimeError("indptr should be non-negative")
        assert paged_kv_last_page_len.shape == seq_lens.shape == (rows,)
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert paged_kv_indices.shape == (int(paged_kv_indptr[-1]),)
        assert torch.equal(seq_lens, (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len)
        assert (qo_indptr.diff() <= seq_lens).all(), "with a causal mask the first queries would see nothing"
        assert num_qo_heads % num_kv_heads == 0
        extra = {torch.float32} if self.float32 else set()
        dtypes = tuple(q_data_type if dtype is None else dtype for dtype in (q_data_type, kv_data_type, o_data_type))
        if not {dtypes[0], dtypes[2]} <= HALF | extra or dtypes[1] not in STORED | extra:
            raise KeyError(dtypes)
        if self._graph:
            if self._most_tokens is None:
                self._most_tokens = tokens
            if tokens > self._most_tokens:
                raise ValueError("The total number of rows in qo_indptr cannot exceed that of the first plan.")
            if rows != self._fixed_rows:
                raise ValueError("The batch size should be fixed during the lifecycle of the wrapper.")
            queries, starts, indices, last = self._buffers
            assert queries is not None and starts is not None and indices is not None and last is not None  # noqa: PT018
            if len(paged_kv_indices) > len(indices):
                raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")
            for target, source in zip((queries, starts, last), host, strict=False):
                target.copy_(source, non_blocking=True)
            indices[: len(paged_kv_indices)].copy_(paged_kv_indices, non_blocking=True)
        else:
            copies = [tensor.to(self.device, non_blocking=True) for tensor in host[:3]]
            self._buffers = copies[0], copies[1], paged_kv_indices, copies[2]
        planned = torch.cat((qo_indptr, paged_kv_indptr)).view(torch.uint8)
        if len(planned) > len(self._plan):
            raise RuntimeError("Failed to allocate memory in the int workspace buffer.")
        if self._graph and 4 * tokens * num_qo_heads * (head_dim_qk + 1) > len(self._scratch):
            raise RuntimeError("Failed to allocate memory for batch_prefill_tmp_v.")
        self._pinned[: len(planned)] = planned
        if self.device.type != "meta":
            self._plan[: len(planned)].copy_(self._pinned[: len(planned)])
        self._planned, self._tokens = len(planned), tokens
        self._arguments = {
            "heads": (num_qo_heads, num_kv_heads),
            "size": head_dim_qk,
            "page_size": page_size,
            "causal": causal,
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "window": window_left,
            "cap": logits_soft_cap or 0.0,
            "dtypes": dtypes,
        }

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        if self._arguments is None:
            raise AssertionError("plan info is not initialized")
        assert isinstance(paged_kv_cache, tuple)
        assert out is not None
        assert sinks is None, "the kernels ignore them"
        assert not args
        assert q_scale is k_scale is window_left is None
        keys, values = paged_kv_cache
        heads, kv_heads = self._arguments["heads"]
        size, page_size = self._arguments["size"], self._arguments["page_size"]
        if (q.dtype, keys.dtype, out.dtype) != self._arguments["dtypes"]:
            raise ValueError("a dtype does not match that of plan")
        if q.shape[0] != self._tokens:
            raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({self._tokens}).")
        assert q.shape == out.shape == (self._tokens, heads, size)
        assert keys.shape == values.shape == (len(keys), kv_heads, page_size, size)
        assert keys.stride() == values.stride(), "other kernels would be compiled"
        assert q.is_contiguous()
        assert {tensor.device for tensor in (q, out, keys, values)} == {self.device}
        if self.device.type != "meta":
            self._compute(q, keys, values, out)
        return out if v_scale in {None, 1.0} else out.mul_(v_scale)

    def _compute(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        queries, starts, indices, last = self._buffers
        assert queries is not None and starts is not None and indices is not None and last is not None  # noqa: PT018
        planned = self._plan[: self._planned].view(torch.int32)
        assert torch.equal(planned, torch.cat((queries, starts))), "of another plan"
        arguments = self._arguments
        assert arguments is not None
        first = starts.tolist()
        for row, (begin, end) in enumerate(pairwise(queries.tolist())):
            pages = indices[first[row] : first[row + 1]].long()
            assert ((pages >= 0) & (pages < len(keys))).all(), "outside the cache"
            length = (len(pages) - 1) * arguments["page_size"] + int(last[row])
            key, value = (
                cache[pages]
                .float()
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                .repeat_interleave(q.shape[1] // keys.shape[1], dim=0)
                for cache in (keys, values)
            )
            scores = arguments["scale"] * (q[begin:end].float().transpose(0, 1) @ key.transpose(1, 2))
            if arguments["cap"] > 0:
                scores = arguments["cap"] * torch.tanh(scores / arguments["cap"])
            distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
            seen = distance >= 0 if arguments["causal"] else torch.ones_like(distance, dtype=torch.bool)
            if arguments["window"] >= 0:
                seen &= distance <= arguments["window"]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[begin:end] = (weights @ value).transpose(0, 1).to(out.dtype)


def module(*, float32: bool = False) -> ModuleType:
    """Returns the module."""
    fake = ModuleType("flashinfer")
    kind = type(
        BatchPrefillWithPagedKVCacheWrapper.__name__,
        (BatchPrefillWithPagedKVCacheWrapper,),
        {"float32": float32, "num_created": 0},
    )
    vars(fake).update({"__version__": VERSION, kind.__name__: kind})
    return fake
