"""The frontend's benchmark measures what it says, at a size that proves nothing about speed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from duograph.server.bench.frontend import BenchFrontendConfig, bench_frontend


@pytest.mark.slow
@pytest.mark.parametrize("observed", [True, False])
def test_every_text_is_checked_and_the_figures_are_there(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, observed: bool
) -> None:
    source = str(Path(__file__).resolve().parents[2] / ".src")
    monkeypatch.setenv("PYTHONPATH", source + os.pathsep + os.environ.get("PYTHONPATH", ""))
    config = BenchFrontendConfig(
        model_folder=str(model_folder), streams=8, tokens=200, rate=2_000.0, observed=observed
    )
    result = bench_frontend(config)
    assert result.wrong_texts == 0
    # paced by the engine: never faster than what is offered, but for the first step's tokens
    assert 0 < result.tokens_per_s < 1.1 * config.rate
    assert result.chunks_per_s <= result.tokens_per_s
    assert result.cpu_us_per_token > 0
    assert 0 < result.ttft_p50_ms <= result.ttft_p99_ms
    assert 0 < result.health_p50_ms <= result.health_p99_ms
