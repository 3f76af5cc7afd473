"""``duograph bench offline`` and its trace of steps, on a model too small to be fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duograph.server.bench import offline

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.slow
def test_the_steps_add_up_to_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "figures.json"
    code = offline.main(
        [
            *("--model-path", str(tmp_path), "--device", "cpu", "--context-length", "256"),
            *("--disable-cuda-graph", "--disable-piecewise-cuda-graph"),
            *("--requests", "12", "--min-len", "5", "--max-len", "30"),
            *("--steps", "--json", str(path)),
        ]
    )
    assert code == 0
    figures = json.loads(path.read_text())
    assert figures["tokens_per_s"] == pytest.approx(figures["output_tokens"] / figures["seconds"])
    extend = [step for step in figures["steps"] if step["kind"] == "extend"]
    decode = [step for step in figures["steps"] if step["kind"] == "decode"]
    assert sum(step["tokens"] for step in extend) == figures["prompt_tokens"]
    # each request's first token comes from its prefill, every other one from a decode step
    assert sum(step["rows"] for step in decode) == figures["output_tokens"] - 12
    for step in figures["steps"]:
        assert step["launch_s"] > 0 and step["wait_s"] >= 0
        assert step["wait_at"] > step["launch_at"]
        assert step["device_s"] is None and step["idle_s"] is None, "there is no device to ask"
    table = capsys.readouterr().out
    assert "12 requests" in table and "extend" in table and "decode" in table
