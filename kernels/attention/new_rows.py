"""What an attention backend may offer beyond ``AttentionBackend``: prefill that reads new keys and
values where the projection left them, and not by pages. Knows no kernel and no layer.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from duograph.kernels.attention.base import AttentionMetadata


@runtime_checkable
class ExtendsNewRows(Protocol):
    """A backend with a faster way for steps in which no sequence has a cached prefix."""

    def extend_new_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> bool:
        """As ``AttentionBackend.extend``, over k and v [num_tokens, num_kv_heads, head_dim].

        Returns whether it was done; if not, because a sequence has a prefix, ``out`` is as before
        and ``extend`` has to be called.
        """
