"""Drives a model over a paged pool as a runner would, one sequence per request row, with pages
handed out in scattered order. Shared by tests; knows no scheduler and no graph."""

from __future__ import annotations

import torch

from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.registry import create_backend
from duograph.runners.batch import ForwardMode
from duograph.runners.forward_context import ForwardContext, use_context
from duograph.runners.kv_pool import KVLayout, KVPool
from duograph.runners.models.llama import CausalLM

CPU = torch.device("cpu")


class PagedSession:
    def __init__(
        self,
        model: CausalLM,
        *,
        rows: int = 8,
        max_len: int = 256,
        page_size: int = 4,
        seed: int = 0,
        device: torch.device = CPU,
        backend: str = "torch",
    ) -> None:
        config = model.config
        self.model = model
        self.page_size = page_size
        columns = -(-max_len // page_size)
        layout = KVLayout(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            page_size,
            model.activation_dtype,
        )
        self.pool = KVPool(layout, rows * columns + 1, device)
        self.backend = create_backend(
            backend,
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=device,
        )
        self.cos_sin = model.cos_sin(device)
        self.device = device
        pages = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed)) + 1
        self.page_table = torch.zeros(rows + 1, columns, dtype=torch.int32)
        self.page_table[1:] = pages.view(rows, columns).to(torch.int32)
        self.lengths = dict.fromkeys(range(1, rows + 1), 0)

    def slots(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        pages = self.page_table[row, positions // self.page_size].to(torch.int64)
        return pages * self.page_size + positions % self.page_size

    @torch.no_grad()
    def extend(self, chunks: dict[int, list[int]], padding: int = 0) -> torch.Tensor:
        """Appends tokens to rows; float32 logits of every real token, [T, vocab]. ``padding``
        more rows go to the dummy slot."""
        positions, slots, starts, seq_lens = [], [], [0], []
        for row, tokens in chunks.items():
            begin = self.lengths[row]
            position = torch.arange(begin, begin + len(tokens))
            self.lengths[row] = begin + len(tokens)
            positions.append(position)
            slots.append(self.slots(row, position))
            starts.append(starts[-1] + len(tokens))
            seq_lens.append(self.lengths[row])
        blank = torch.zeros(padding, dtype=torch.int64)
        meta = AttentionMetadata(
            page_table=self._moved(self.page_table),
            req_pool_indices=self._moved(torch.tensor(list(chunks))),
            seq_lens=self._moved(torch.tensor(seq_lens, dtype=torch.int32)),
            out_cache_loc=self._moved(torch.cat([*slots, blank])),
            page_size=self.page_size,
            query_start_loc=self._moved(torch.tensor(starts, dtype=torch.int32)),
            max_extend_len=max(len(tokens) for tokens in chunks.values()),
            num_real_tokens=starts[-1],
        )
        ids = torch.tensor([token for tokens in chunks.values() for token in tokens])
        ids, position = torch.cat([ids, blank]), torch.cat([*positions, blank])
        return self._forward(meta, ForwardMode.EXTEND, ids, position)[: starts[-1]]

    @torch.no_grad()
    def decode(self, tokens: dict[int, int], padding: int = 0) -> torch.Tensor:
        """One more token on each row; float32 logits [rows, vocab]."""
        rows = list(tokens)
        positions = torch.tensor([self.lengths[row] for row in rows])
        slots = [self.slots(row, torch.tensor(self.lengths[row])) for row in rows]
        for row in rows:
            self.lengths[row] += 1
        blank = torch.zeros(padding, dtype=torch.int64)
        lens = [self.lengths[row] for row in rows] + [1] * padding
        meta = AttentionMetadata(
            page_table=self._moved(self.page_table),
            req_pool_indices=self._moved(torch.tensor(rows + [0] * padding)),
            seq_lens=self._moved(torch.tensor(lens, dtype=torch.int32)),
            out_cache_loc=self._moved(torch.cat([torch.stack(slots), blank])),
            page_size=self.page_size,
        )
        ids = torch.cat([torch.tensor(list(tokens.values())), blank])
        position = torch.cat([positions, blank])
        return self._forward(meta, ForwardMode.DECODE, ids, position)[: len(rows)]

    def _forward(
        self, meta: AttentionMetadata, mode: ForwardMode, ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        self.backend.prepare(meta)
        context = ForwardContext(meta, mode, self.pool, self.backend, self.cos_sin)
        with use_context(context):
            hidden = self.model.model(self._moved(ids), self._moved(positions))
            return self.model.compute_logits(hidden).cpu()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def greedy(self, row: int, prompt: list[int], count: int) -> list[int]:
        """``count`` tokens after ``prompt``, greedy, one row alone."""
        logits = self.extend({row: prompt})[-1:]
        produced: list[int] = []
        while True:
            produced.append(int(logits.argmax()))
            if len(produced) == count:
                return produced
            logits = self.decode({row: produced[-1]})
