"""Weights from safetensors folders: complete and exact, or an error that names the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from duograph.kernels import packed_linear
from duograph.runners.config import RunnerConfig
from duograph.runners.layers.block import DecoderBlock
from duograph.runners.layers.weights import TPGroup, model_weight_slots
from duograph.runners.model_config import ModelConfig, ModelError
from duograph.runners.models.llama import CausalLM, create_model
from duograph.runners.models.loader import load_model
from duograph.tests.paged_session import PagedSession
from duograph.tests.runners.tiny_models import save_reference

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


def load(folder: Path, dtype: str = "float32", load_format: str = "auto") -> CausalLM:
    config = RunnerConfig(model_path=str(folder), dtype=dtype, load_format=load_format)
    return load_model(config, ModelConfig.from_folder(folder), CPU)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_reference("llama_tied", tmp_path)
    return tmp_path


def block(model: CausalLM, layer: int) -> DecoderBlock:
    module = model.model.layers[layer]
    assert isinstance(module, DecoderBlock)
    return module


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"missing tensors: model\.layers\.1\.mlp\.up_proj"):
        load(folder)


def test_a_leftover_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.b"):
        load(folder)


def test_a_long_list_of_names_is_cut(folder: Path) -> None:
    rewrite(folder, {f"extra.{i:02d}": torch.zeros(1) for i in range(20)})
    with pytest.raises(ModelError, match=r"extra\.07 and 12 more"):
        load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, {"model.layers.2.self_attn.k_proj.weight": torch.zeros(64, 64)})
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.k_proj.*\[64, 64\].*\[16, 64\]"):
        load(folder)


def test_redundant_tensors_are_not_leftover(folder: Path) -> None:
    table = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
    frequencies = torch.ones(4)
    rewrite(
        folder,
        {
            "lm_head.weight": table.clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": frequencies,
        },
    )
    load(folder)


def test_a_sharded_folder_equals_the_single_file(folder: Path, tmp_path: Path) -> None:
    whole = load(folder)
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    sharded = load(folder)
    for ours, theirs in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(ours, theirs)

    index.write_text(json.dumps({"weight_map": weight_map | {"x": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match=r"weight_map\.x: must be a file name"):
        load(folder)
    index.write_text(json.dumps({"weight_map": weight_map | {"x": "model-9.safetensors"}}))
    with pytest.raises(ModelError, match=r"names model-9\.safetensors, which is not"):
        load(folder)


def test_pickled_weights_are_refused_unread(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin.*can run code"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_a_damaged_file_is_named(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not readable"):
        load(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors: not readable"):
        load(folder)


def test_progress_counts_every_tensor(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = RunnerConfig(model_path=str(folder), dtype="float32")
    load_model(config, ModelConfig.from_folder(folder), CPU, lambda *step: seen.append(step))
    total = 2 + 3 * 9
    assert seen == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dummy_weights_are_seeded_and_give_finite_logits(folder: Path, dtype: str) -> None:
    (folder / WEIGHTS).unlink()
    logits = []
    for _ in range(2):
        session = PagedSession(load(folder, dtype, "dummy"))
        logits.append(session.extend({1: list(range(1, 60))}))
    assert torch.equal(logits[0], logits[1])
    assert logits[0].isfinite().all()
    assert 0.05 < float(logits[0].std()) < 20.0


def test_no_parameter_wants_a_gradient(folder: Path) -> None:
    assert not any(parameter.requires_grad for parameter in load(folder).parameters())


@pytest.mark.skipif(not packed_linear.is_available(), reason="this build of torch has no FBGEMM")
def test_sixteen_bit_weights_on_cpu_are_packed_unless_one_is_too_large(folder: Path) -> None:
    packed = load(folder, "bfloat16")
    assert packed.activation_dtype == torch.float32
    assert packed.lm_head.weight is None
    assert block(packed, 0).mlp.down_proj.weight is None
    assert load(folder).lm_head.weight is not None  # float32 stays

    name = "model.layers.2.mlp.down_proj.weight"
    tensor = load_file(folder / WEIGHTS)[name]
    tensor[3, 4] = 1e5
    rewrite(folder, {name: tensor})
    plain = load(folder, "bfloat16")
    assert plain.activation_dtype == torch.bfloat16
    assert plain.lm_head.weight is not None
    session = PagedSession(plain)
    assert session.extend({1: [1, 2, 3]}).isfinite().all()


def test_weight_bytes_count_packed_and_tied_weights_once(folder: Path) -> None:
    count = ModelConfig.from_folder(folder).num_parameters
    assert load(folder).weight_bytes() == 4 * count
    packed = load(folder, "bfloat16")
    if packed.activation_dtype == torch.float32:
        table = 200 * 64 * 2  # the packed head is a second copy of the tied table
        norms = (2 * 3 + 1) * 64
        assert packed.weight_bytes() == 2 * (count - norms) + 4 * norms + table


def test_the_shards_of_two_ranks_put_together_are_the_whole(folder: Path) -> None:
    """Column-parallel rows, row-parallel columns, vocabulary: each rank its half."""
    config = ModelConfig.from_folder(folder)
    tensors = load_file(folder / WEIGHTS)
    whole = load(folder)
    halves = []
    for rank in range(2):
        half = create_model(config, dtype=torch.float32, device=CPU, tp=TPGroup(rank, 2))
        slots = model_weight_slots(half)
        assert slots.keys() == tensors.keys()
        with torch.no_grad():
            for name, slot in slots.items():
                slot.load(tensors[name])
        halves.append(half)
    x = torch.randn(5, 64)
    layer, first, second = (block(model, 1) for model in (whole, *halves))
    q_rows, kv_rows = 32, 8  # of one rank
    merged = [half.self_attn.qkv_proj(x) for half in (first, second)]
    parts = [out.split((q_rows, kv_rows, kv_rows), dim=-1) for out in merged]
    together = torch.cat([torch.cat(pair, dim=-1) for pair in zip(*parts, strict=True)], dim=-1)
    torch.testing.assert_close(together, layer.self_attn.qkv_proj(x))
    wide = torch.randn(5, 96)
    summed = first.mlp.down_proj(wide[:, :48]) + second.mlp.down_proj(wide[:, 48:])
    torch.testing.assert_close(summed, layer.mlp.down_proj(wide))
    with pytest.raises(ValueError, match="does not divide over tp_size 3"):
        create_model(config, dtype=torch.float32, device=CPU, tp=TPGroup(0, 3))
