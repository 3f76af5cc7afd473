"""The paged pool of keys and values, and how many bytes a page of it takes.

``slot = page * page_size + offset``. Page 0 is the dummy page: padding rows write there and
nothing else may. This file knows no request; which page belongs to whom is the scheduler's
business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the pool without its length."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers, keys and values together."""
        per_layer = self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return 2 * self.num_layers * per_layer

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size


class KVPool:
    """Keys and values of every layer.

    Attributes:
        k, v: one tensor per layer, ``layout.dtype`` [num_pages * page_size, num_kv_heads,
            head_dim]. Index with a layer id.
        num_pages: pages including the dummy page 0.
        page_size: tokens of one page.
    """

    def __init__(self, layout: KVLayout, num_pages: int, device: torch.device) -> None:
        """Allocates zeroed tensors, so that a never-written slot is a number, not garbage.

        Raises:
            ValueError: fewer than two pages: the dummy page leaves none for a request.
        """
        if num_pages < 2:
            raise ValueError(f"the KV pool needs at least 2 pages, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = layout.page_size
        shape = (num_pages * layout.page_size, layout.num_kv_heads, layout.head_dim)
        self.k = [
            torch.zeros(shape, dtype=layout.dtype, device=device) for _ in range(layout.num_layers)
        ]
        self.v = [
            torch.zeros(shape, dtype=layout.dtype, device=device) for _ in range(layout.num_layers)
        ]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_tokens(self) -> int:
        """Tokens that requests can hold: the dummy page is not theirs."""
        return (self.num_pages - 1) * self.page_size

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.layout.bytes_per_page
