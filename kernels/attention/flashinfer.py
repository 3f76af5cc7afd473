"""FlashInfer behind the ``AttentionBackend`` protocol.

FlashInfer plans on the host: before every step it cuts the sequences into work for the card and
copies the result into buffers that its kernels read. ``prepare`` does that from the host's copy
of the lengths, so it never waits for the device; the page ids are gathered on the device. In
decode there is one wrapper per batch size, whose buffers never move, so a captured ``run`` serves
every later plan. FA3 reads keys faster by rows than by pages, so a step without cached prefixes
is planned over its own rows. This file knows no batch, layer or graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.flashinfer_jit import (
    load_package,
    prefill_kind,
    uses_tensor_cores,
)
from duograph.kernels.attention.flashinfer_workspace import Scratch
from duograph.kernels.attention.page_list import list_pages

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)

_FA3_FLOAT_BYTES = 16  # it never splits a sequence of keys and needs no scratch


@dataclass(slots=True)
class _Planned:
    """A wrapper and the moment its pinned plan buffer has been copied from."""

    wrapper: Any
    copied: torch.cuda.Event
    is_planned: bool = False


@dataclass(frozen=True, slots=True)
class _Pages:
    """What the page list kernel fills; sized for a batch of every row at full length."""

    indptr: torch.Tensor  # int32 [max_rows + 1]
    last_page_len: torch.Tensor  # int32 [max_rows]
    ids: torch.Tensor  # int32 [max_rows * max_pages]


class FlashInferBackend:
    """See ``AttentionBackend`` and ``ExtendsNewRows``. bf16 and fp16; head dimensions
    ``HEAD_DIMS``; any page size.

    Workspaces and page lists are made at the first ``prepare``, from the shape of its page
    table, which has to stay the same; captured graphs hold their addresses. Calls must come from
    one thread, on the stream that ``prepare`` was called on.
    """

    name = "flashinfer"

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        prefill: str | None = None,
        by_rows: bool = True,
    ) -> None:
        """
        Args:
            dtype: of queries, keys, values and outputs.
            prefill: "fa2" or "fa3"; what suits the card if left out.
            by_rows: whether FA3 may read the rows of a step without prefixes instead of pages.

        Raises:
            FlashInferUnavailable: the package is missing or broken.
            ValueError: a head dimension or dtype that it has no kernels for.
        """
        if head_dim not in HEAD_DIMS or dtype not in DTYPES:
            raise ValueError(
                f"FlashInfer runs head_dim {HEAD_DIMS} in bfloat16 or float16, "
                f"not {head_dim} in {str(dtype).removeprefix('torch.')}"
            )
        self._flashinfer = load_package(device)
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.group = num_q_heads // num_kv_heads
        self.head_dim = head_dim
        self.device = device
        self.dtype = dtype
        self.prefill = prefill or prefill_kind(self.device)
        self._may_read_rows = by_rows and self.prefill == "fa3"
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._scratch = Scratch(num_q_heads, num_kv_heads, head_dim, sms)
        self._pages: _Pages | None = None
        self._decode: dict[int, _Planned] = {}
        self._extend: _Planned | None = None  # over pages
        self._rows: _Planned | None = None  # over the rows of the step itself
        self._by_rows = False  # of the step that was prepared
        self._decode_float: torch.Tensor | None = None
        self._decode_int: torch.Tensor | None = None

    def prepare(self, meta: AttentionMetadata) -> None:
        """Plans the step.

        Raises:
            ValueError: ``meta`` lacks the lengths in host memory.
        """
        if meta.seq_lens_cpu is None:
            raise ValueError("FlashInfer plans on the host: AttentionMetadata.seq_lens_cpu is None")
        self._by_rows = self._may_read_rows and _has_no_prefix(meta)
        if self._by_rows:
            self._plan_rows(meta)
            return
        pages = self._pages_for(meta)
        list_pages(meta, pages.indptr, pages.last_page_len, pages.ids)
        if meta.query_start_loc is None:
            self._plan_decode(meta, pages)
        else:
            self._plan_extend(meta, pages)

    def decode(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """See ``AttentionBackend.decode``. ``out`` must be dense."""
        self._run(self._decode[q.shape[0]].wrapper, q, k_cache, v_cache, meta, out, scale)

    def extend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """See ``AttentionBackend.extend``. ``out`` must be dense."""
        if self._by_rows:  # the caller has no rows at hand: plan for pages, once a step
            self._by_rows = False
            pages = self._pages_for(meta)
            list_pages(meta, pages.indptr, pages.last_page_len, pages.ids)
            self._plan_extend(meta, pages)
        assert self._extend is not None, "prepare() comes first"
        real = meta.num_real_tokens
        if real is not None:
            q, out = q[:real], out[:real]
        self._run(self._extend.wrapper, q, k_cache, v_cache, meta, out, scale)

    def extend_new_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> bool:
        """See ``ExtendsNewRows``. ``out`` must be dense."""
        if not self._by_rows:
            return False
        assert self._rows is not None, "prepare() comes first"
        if not math.isclose(scale, self.head_dim**-0.5, rel_tol=1e-6):
            raise ValueError(f"scale {scale} is not that of head_dim {self.head_dim}")
        real = meta.num_real_tokens
        if real is not None:
            q, k, v, out = q[:real], k[:real], v[:real], out[:real]
        _check_dense(out)
        self._rows.wrapper.run(q, k, v, out=out)
        return True

    def _run(
        self,
        wrapper: Any,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        _check_dense(out)
        paged = (-1, meta.page_size, self.num_kv_heads, self.head_dim)
        # The plan's own scale is 1, so this is the whole of it.
        wrapper.run(q, (k_cache.view(paged), v_cache.view(paged)), out=out, q_scale=scale)

    def _plan_decode(self, meta: AttentionMetadata, pages: _Pages) -> None:
        assert meta.seq_lens_cpu is not None
        lens = meta.seq_lens_cpu.numpy()
        bs = len(lens)
        planned = self._decode.get(bs)
        if planned is None:
            planned = self._decode[bs] = self._new_decode(bs, pages)
        wrapper = planned.wrapper
        counts, last = _page_counts(lens, meta.page_size)
        indptr = torch.from_numpy(_starts(counts))
        last_page_len = torch.from_numpy(last)
        shape = (self.num_q_heads, self.num_kv_heads, self.head_dim, meta.page_size)
        options = {"q_data_type": self.dtype, "kv_data_type": self.dtype, "sm_scale": 1.0}
        planned.copied.synchronize()
        if planned.is_planned:
            # Buffers on the device are filled by list_pages() already.
            self._flashinfer.fast_decode_plan(
                wrapper,
                indptr,
                pages.ids,
                last_page_len,
                *shape,
                **options,
                global_override_indptr_cpu=indptr,
            )
        else:  # once a batch size: this one loads the kernel
            used = pages.ids[: int(indptr[-1])]
            wrapper.plan(indptr, used, last_page_len, *shape, **options)
            planned.is_planned = True
        planned.copied.record()

    def _plan_extend(self, meta: AttentionMetadata, pages: _Pages) -> None:
        assert meta.seq_lens_cpu is not None
        if meta.extend_lens is None:
            raise ValueError("FlashInfer plans on the host: AttentionMetadata.extend_lens is None")
        if self._extend is None:
            self._extend = self._new_extend()
        lens = meta.seq_lens_cpu.numpy()
        counts, last = _page_counts(lens, meta.page_size)
        kv_starts = _starts(counts)
        # One pinned block, so that the copies to the device wait for nothing. The caching host
        # allocator keeps it until they have run.
        parts = (_starts(np.asarray(meta.extend_lens, dtype=np.int32)), kv_starts, last, lens)
        block = torch.from_numpy(np.concatenate(parts)).pin_memory()
        query_starts, page_starts, last_page_len, seq_lens = torch.split_with_sizes(
            block, [len(part) for part in parts]
        )
        self._extend.copied.synchronize()
        self._extend.wrapper.plan(
            query_starts,
            page_starts,
            pages.ids[: int(kv_starts[-1])],
            last_page_len,
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            meta.page_size,
            causal=True,
            sm_scale=1.0,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
            seq_lens=seq_lens,
            max_token_per_sequence=meta.max_extend_len,
        )
        self._extend.copied.record()

    def _plan_rows(self, meta: AttentionMetadata) -> None:
        assert meta.extend_lens is not None
        if self._rows is None:
            wrapper = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
                self._bytes(_FA3_FLOAT_BYTES), "NHD", backend=self.prefill
            )
            self._rows = _Planned(wrapper, torch.cuda.Event())  # type: ignore[no-untyped-call]
        lens = np.asarray(meta.extend_lens, dtype=np.int32)
        starts = torch.from_numpy(_starts(lens)).pin_memory()
        self._rows.copied.synchronize()
        self._rows.wrapper.plan(
            starts,
            starts,
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            causal=True,
            q_data_type=self.dtype,
            kv_data_type=self.dtype,
        )
        self._rows.copied.record()

    def _pages_for(self, meta: AttentionMetadata) -> _Pages:
        rows, columns = meta.page_table.shape
        pages = self._pages
        if pages is None:

            def buffer(size: int) -> torch.Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self.device)

            pages = self._pages = _Pages(buffer(rows + 1), buffer(rows), buffer(rows * columns))
        elif pages.ids.shape[0] != rows * columns or pages.last_page_len.shape[0] != rows:
            raise ValueError(
                "the page table has changed its shape; captured graphs know the buffers of the "
                "first one"
            )
        return pages

    def _new_decode(self, bs: int, pages: _Pages) -> _Planned:
        """A wrapper over the shared buffers, with a pinned plan buffer of its own. Sharing is safe
        because a plan is copied to the device in the order of the steps."""
        if self._decode_float is None or self._decode_int is None:
            most = pages.last_page_len.shape[0]
            self._decode_float = self._bytes(self._scratch.decode_float_bytes(most))
            self._decode_int = self._bytes(self._scratch.decode_int_bytes(most))
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._decode_float,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=uses_tensor_cores(self.group),
            paged_kv_indptr_buffer=pages.indptr[: bs + 1],
            paged_kv_indices_buffer=pages.ids,
            paged_kv_last_page_len_buffer=pages.last_page_len[:bs],
            backend="fa2",
        )
        # Its own 8 MiB on the device and 8 MiB pinned, for each of many sizes, go again.
        wrapper.reset_workspace_buffer(self._decode_float, self._decode_int)
        return _Planned(wrapper, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _new_extend(self) -> _Planned:
        scratch = self._scratch.extend_float_bytes()
        if self.prefill == "fa3":
            scratch = _FA3_FLOAT_BYTES
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._bytes(scratch), "NHD", backend=self.prefill
        )
        return _Planned(wrapper, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)


def _page_counts(lens: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [bs] twice: pages of each sequence, and tokens in the last one."""
    counts = (lens + (page_size - 1)) // page_size
    return counts, lens - (counts - 1) * page_size


def _starts(counts: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: where each of ``counts`` begins, and the end of all."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _has_no_prefix(meta: AttentionMetadata) -> bool:
    """Whether this is an extend step whose sequences all begin in it."""
    if meta.query_start_loc is None or meta.extend_lens is None or meta.seq_lens_cpu is None:
        return False
    return bool(meta.seq_lens_cpu.tolist() == meta.extend_lens)


def _check_dense(out: torch.Tensor) -> None:
    if not out.is_contiguous():  # FlashInfer reads no stride of it
        raise ValueError(f"out must be dense, its strides are {out.stride()}")
