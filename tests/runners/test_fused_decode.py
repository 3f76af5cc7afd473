"""A backend that does a decode step's rotation, KV write and attention at once is asked for it in
decode and only there, traced or not. The kernel itself is tests/gpu's; here a twin stands in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from duograph.kernels import fused
from duograph.kernels.attention.base import AttentionMetadata
from duograph.kernels.attention.fused_decode import FusedDecode, Rotary
from duograph.kernels.attention.torch import TorchBackend
from duograph.runners.models.llama import CausalLM
from duograph.tests.paged_session import PagedSession
from duograph.tests.worker_driver import tiny_config, tiny_model

CPU = torch.device("cpu")
ATTENTION_OPS = {
    "duograph.fused_decode.default",
    "duograph.rope_and_cache.default",
    "duograph.attention.default",
}


class FusedTwin(TorchBackend):
    """TorchBackend, and what it takes to be a ``FusedDecode``."""

    max_fused_rows = 3
    rows: tuple[int, ...] = ()  # of each fused call

    def decode_fused(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        self.rows += (len(q),)
        q, k = q.clone(), k.clone()
        fused.rope_and_cache(
            q,
            k,
            v,
            rotary.positions,
            rotary.cos_sin,
            k_cache,
            v_cache,
            meta.out_cache_loc,
            q_norm=rotary.q_norm,
            k_norm=rotary.k_norm,
            eps=rotary.eps,
        )
        super().decode(q, k_cache, v_cache, meta, out, scale)


def model(qk_norm: bool) -> CausalLM:
    return tiny_model(tiny_config(qk_norm=qk_norm), CPU, torch.float32)


def answers(session: PagedSession) -> torch.Tensor:
    """Logits of two prompts, of three decode steps and of one more chunk."""
    prompts = session.extend({1: [5, 1, 90, 7, 33], 2: [4, 8]})
    steps = [session.decode({1: token, 2: token + 1}, padding=1) for token in (3, 88, 12)]
    return torch.cat([prompts, *steps, session.extend({1: [9, 9]})])


def fused_session(tested: CausalLM) -> tuple[PagedSession, FusedTwin]:
    session = PagedSession(tested, device=CPU, backend="torch", page_size=4)
    config = tested.config
    twin = FusedTwin(
        num_q_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        device=CPU,
    )
    assert isinstance(twin, FusedDecode) and not isinstance(session.backend, FusedDecode)
    session.backend = twin
    return session, twin


@pytest.mark.parametrize("qk_norm", [False, True])
def test_decode_takes_the_fused_op_and_extend_does_not(qk_norm: bool) -> None:
    tested = model(qk_norm)
    wanted = answers(PagedSession(tested, device=CPU, backend="torch", page_size=4))
    session, twin = fused_session(tested)
    torch.testing.assert_close(answers(session), wanted)
    assert twin.rows == (3,) * 3 * tested.config.num_layers
    before = twin.rows
    session.decode({1: 5, 2: 6}, padding=2)  # more rows than pay
    assert twin.rows == before


@pytest.mark.slow
def test_each_phase_is_traced_with_its_own_ops() -> None:
    tested = model(qk_norm=True)
    wanted = answers(PagedSession(tested, device=CPU, backend="torch", page_size=4))
    session, twin = fused_session(tested)
    seen: list[set[str]] = []

    def note(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        names = {str(node.target) for node in graph.graph.nodes}
        seen.append({name for name in names if name.startswith("duograph.")})
        return graph

    forward = tested.model.forward
    phases = {
        name: torch.compile(forward, backend=lambda *args: note(*args), fullgraph=True)
        for name in ("extend", "decode")
    }
    plain_extend, plain_decode = session.extend, session.decode

    def extend(*args: Any, **options: Any) -> torch.Tensor:
        tested.model.forward = phases["extend"]  # type: ignore[method-assign]
        return plain_extend(*args, **options)

    def decode(*args: Any, **options: Any) -> torch.Tensor:
        tested.model.forward = phases["decode"]  # type: ignore[method-assign]
        return plain_decode(*args, **options)

    session.extend, session.decode = extend, decode  # type: ignore[method-assign]
    torch.testing.assert_close(answers(session), wanted)
    assert twin.rows == (3,) * 3 * tested.config.num_layers
    assert {frozenset(ops & ATTENTION_OPS) for ops in seen} == {
        frozenset({"duograph.fused_decode.default"}),
        frozenset({"duograph.rope_and_cache.default", "duograph.attention.default"}),
    }
