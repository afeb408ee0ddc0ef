"""A checkpoint exported to Hugging Face files computes the same logits; such files import on any leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint_state import head, shard_bytes
from tests.hub_model import HubModel
from tests.reference_model import score, stored_weights
from unirl_scale.core.config import ModelConfig, ModelsConfig, RunConfig
from unirl_scale.core.errors import CheckpointError, ConfigError
from unirl_scale.core.pretrained import read_model, with_pretrained
from unirl_scale.parallel.spec import initial_leaf, normal_rows, parameter_specs
from unirl_scale.train.checkpoint import export as exporting
from unirl_scale.train.checkpoint.entries import TRAINED_KINDS, Entry, Slab, Span
from unirl_scale.train.checkpoint.export import export
from unirl_scale.train.checkpoint.manifest import Manifest, SavedRole
from unirl_scale.train.checkpoint.names import SaveName
from unirl_scale.train.checkpoint.store import Store
from unirl_scale.train.pretrained import PretrainedFiles, pretrained_rows

LLAMA = ModelConfig(
    hidden_size=24,
    num_layers=2,
    num_heads=12,
    num_kv_heads=6,
    head_dim=4,
    ffn_size=36,
    vocab_size=29,
    init_std=0.3,
    rope_theta=500.0,
    norm_eps=1e-5,
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, qkv_bias=True, tie_embeddings=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=8),
    "qwen3 with biases": replace(LLAMA, qk_norm=True, qkv_bias=True),
}
LEAVES = 6
IDS = [3, 28, 0, 11, 7, 7, 19]


def weights_of(model: ModelConfig, kind: str = "lm") -> dict[str, Tensor]:
    """The reference model's weights, with norms and biases that are not their initial ones."""
    weights = stored_weights(model, LEAVES, kind, seed=5)
    g = torch.Generator().manual_seed(1)
    for name, value in weights.items():
        if value.dim() == (2 if name.endswith("qkv_bias") else 1):
            value.data += 0.2 * torch.randn(value.shape, generator=g).double()
        value.data = value.data.float().double()  # what a master weight can be
    return weights


def save(path: Path, model: ModelConfig, weights: dict[str, Tensor], kind: str = "lm") -> Path:
    """A durable checkpoint of one role; returns its folder."""
    role = "actor" if kind == "lm" else "critic"
    slabs = []
    for spec in parameter_specs(model, LEAVES, kind):  # type: ignore[arg-type]
        flat = weights[spec.name].detach().float().reshape(-1)
        leaves = LEAVES if spec.leafed else 1
        for state in TRAINED_KINDS:
            spans = [Span(name=spec.name, leaf=i, start=0, stop=spec.numel) for i in range(leaves)]
            entries = tuple(Entry(role=role, kind=state, span=s) for s in spans)
            slabs.append(Slab(tensor=flat.contiguous(), entries=entries, group="train", written=True))
    part, data = shard_bytes(slabs, 0)
    store, name = Store(path), SaveName(3, 1)
    store.folder(name).mkdir(parents=True)
    (store.folder(name) / part.file).write_bytes(data.numpy().tobytes())
    saved = SavedRole(model=model, head=kind, leaves=LEAVES, adam_steps=3, trained=True)
    config = {"rollout": {"max_prompt_tokens": 40, "max_response_tokens": 24}}
    store.publish(name, Manifest(head=head(1, roles={role: saved}, config=config), parts=(part,)))
    return store.folder(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_files_give_the_same_logits(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family]
    weights = weights_of(model)
    done = export(save(tmp_path / "c", model, weights), tmp_path / "hub", "actor", "F32")
    hub = HubModel(tmp_path / "hub")
    assert hub.config["model_type"] == family.split()[0]
    assert (done.step, done.tensors) == (3, len(hub.tensors))
    expected, _ = score(model, LEAVES, weights, (IDS[0],), tuple(IDS[1:]))
    logits = hub.logits(IDS).log_softmax(-1)
    got = logits[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    assert torch.allclose(got, expected.detach(), rtol=1e-12, atol=1e-12)


def test_a_critic_is_a_token_classifier_with_one_label(tmp_path: Path) -> None:
    model = FAMILIES["qwen3"]
    weights = weights_of(model, "value")
    export(save(tmp_path / "c", model, weights, "value"), tmp_path / "hub", "critic", "F32")
    hub = HubModel(tmp_path / "hub")
    assert hub.config["architectures"] == ["Qwen3ForTokenClassification"]
    assert hub.config["num_labels"] == 1
    expected, _ = score(model, LEAVES, weights, (IDS[0],), tuple(IDS[1:]))
    assert torch.allclose(hub.logits(IDS)[:-1, 0], expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leaves", [1, 3, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_files_import_on_any_number_of_leaves(tmp_path: Path, family: str, leaves: int) -> None:
    model = FAMILIES[family]
    weights = weights_of(model)
    export(save(tmp_path / "c", model, weights), tmp_path / "hub", "actor", "F32")
    assert read_model(tmp_path / "hub") == model
    with PretrainedFiles(tmp_path / "hub") as files:
        specs = parameter_specs(model, leaves, "lm")
        rows = pretrained_rows(files, [p for s in specs for p in s.parts], normal_rows(0))
        stored = {
            s.name: torch.stack([initial_leaf(s, i, leaves, rows) for i in range(leaves if s.leafed else 1)])
            for s in specs
        }
    if leaves == LEAVES:
        assert all(torch.equal(stored[n], w.float().reshape(stored[n].shape)) for n, w in weights.items())
    again = {s.name: stored[s.name].double() if s.leafed else stored[s.name][0].double() for s in specs}
    a, _ = score(model, leaves, again, (IDS[0],), tuple(IDS[1:]))
    b, _ = score(model, LEAVES, weights, (IDS[0],), tuple(IDS[1:]))
    assert torch.allclose(a, b.detach(), rtol=1e-12, atol=1e-12)


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(exporting, "SHARD_BYTES", 10_000)
    folder = save(tmp_path / "c", LLAMA, weights_of(LLAMA))
    done = export(folder, tmp_path / "many", "actor", "BF16")
    monkeypatch.undo()
    export(folder, tmp_path / "one", "actor", "BF16")
    assert done.files > 2
    many, one = HubModel(tmp_path / "many"), HubModel(tmp_path / "one")
    assert many.tensors.keys() == one.tensors.keys()
    assert all(torch.equal(many.tensors[n], one.tensors[n]) for n in one.tensors)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.num_bytes
    with PretrainedFiles(tmp_path / "many") as files:
        assert files.names == one.tensors.keys()


def test_export_names_damage_and_wrong_roles_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", LLAMA, weights_of(LLAMA))
    with pytest.raises(CheckpointError, match="it has no critic; it has actor"):
        export(folder, tmp_path / "hub", "critic", "F32")
    file = next(folder.glob("rank-*"))
    data = bytearray(file.read_bytes())
    data[6000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged in bytes"):
        export(folder, tmp_path / "hub", "actor", "F32")
    assert not (tmp_path / "hub").exists()


# ---- import -------------------------------------------------------------------------------------------
@pytest.fixture
def hub(tmp_path: Path) -> Path:
    export(save(tmp_path / "c", LLAMA, weights_of(LLAMA)), tmp_path / "hub", "actor", "F32")
    return tmp_path / "hub"


def rewrite(hub: Path, **changes: object) -> None:
    plain = json.loads((hub / "config.json").read_text()) | changes
    (hub / "config.json").write_text(json.dumps(plain))


def test_a_model_that_is_left_out_takes_the_directory_s_sizes(hub: Path) -> None:
    cfg = with_pretrained(RunConfig(model=ModelsConfig(actor_path=str(hub), critic_path=str(hub))))
    assert cfg.model.actor == LLAMA
    assert cfg.model.critic == LLAMA
    assert with_pretrained(cfg) == cfg, "the ranks read the resolved configuration again"


def test_a_model_that_is_spelt_out_must_have_the_directory_s_sizes(hub: Path) -> None:
    other = replace(LLAMA, hidden_size=48, qk_norm=True)
    with pytest.raises(ConfigError) as error:
        with_pretrained(RunConfig(model=ModelsConfig(actor=other, actor_path=str(hub))))
    assert "model.actor.hidden_size: got 48; must be that of model.actor_path; hint: 24" in str(error.value)
    assert "model.actor.qk_norm: got true" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, 'model_type: got "mixtral"; must be one of llama, qwen2, qwen3'),
        ({"hidden_act": "gelu"}, 'hidden_act: got "gelu"; must be "silu" or left out'),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: got .*; must be plain rotary embedding"),
        ({"num_hidden_layers": None}, "it lacks num_hidden_layers"),
    ],
)
def test_arithmetic_that_this_trainer_does_not_do_is_refused(hub: Path, changes: dict, message: str) -> None:
    rewrite(hub, **changes)
    with pytest.raises(ConfigError, match=message):
        read_model(hub)


def rows_of(hub: Path, model: ModelConfig, kind: str = "lm"):
    parts = [p for s in parameter_specs(model, 1, kind) for p in s.parts]  # type: ignore[arg-type]
    return pretrained_rows(PretrainedFiles(hub), parts, normal_rows(9)), {p.name: p for p in parts}


def test_a_critic_starts_from_a_language_model_with_a_fresh_value_head(hub: Path) -> None:
    rows, parts = rows_of(hub, LLAMA, "value")
    head_part, body = parts["value_head.weight"], parts["layers.1.mlp.up_proj.weight"]
    assert (rows(head_part, 0, 1) == normal_rows(9)(head_part, 0, 1)).all()
    expected = HubModel(hub).tensors["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(torch.from_numpy(rows(body, 0, 36)).double(), expected)


def test_weights_that_do_not_fit_are_refused(hub: Path) -> None:
    with pytest.raises(ConfigError, match=r"it lacks model.layers.0.self_attn.q_proj.bias"):
        rows_of(hub, replace(LLAMA, qkv_bias=True))
    with pytest.raises(ConfigError, match=r"it holds model.layers.1.*, which this model has no place for"):
        rows_of(hub, replace(LLAMA, num_layers=1))
    rows, parts = rows_of(hub, replace(LLAMA, ffn_size=72))
    with pytest.raises(ConfigError, match=r"gate_proj.weight is \[36, 24\]; this model's is \[72, 24\]"):
        rows(parts["layers.0.mlp.gate_proj.weight"], 0, 72)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no config.json; must be a Hugging Face model directory"):
        read_model(tmp_path)
    with pytest.raises(ConfigError, match=r"it has neither model.safetensors nor"):
        PretrainedFiles(tmp_path)
