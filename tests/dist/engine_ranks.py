"""What the engine tests run on ranks: five optimizer steps of a PPO-like minibatch, reduced to digests."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import torch

from tests.dist.engine_faults import FAULTS, Fault
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import HardwareConfig, InvarianceConfig, MeshConfig, ModelConfig, OptimConfig
from unirl_scale.core.mesh import Mesh
from unirl_scale.kernels.fast import FastOps
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.select import op_table, probe_shapes
from unirl_scale.parallel.build import RoleGroups, build_context
from unirl_scale.parallel.samples import Sample
from unirl_scale.parallel.spec import parameter_specs
from unirl_scale.rl.interface import LossBatch
from unirl_scale.rl.ppo import Ppo, PpoOptions
from unirl_scale.train.learn import LearnReport, learn
from unirl_scale.train.minibatch import Minibatch
from unirl_scale.train.roles import DTYPES, Role

Digests = list[dict[str, str]]
STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a layout; the mesh's ranks are the whole world unless they say otherwise."""

    model: ModelConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    leaves: int = 12
    slots: int = 12
    head: str = "lm"
    precision: str = "fp32"
    samples: int = 13
    steps: int = STEPS
    gemm: str = "blocked"
    leaf_dtype: str = "fp32"
    mode: str = "layout"
    fault: str = ""
    max_tokens: int = 48

    @property
    def world_size(self) -> int:
        return self.mesh.tp * self.mesh.pp * self.mesh.dp

    @property
    def tensors(self) -> set[str]:
        """What every step's digests must hold."""
        names = [spec.name for spec in parameter_specs(self.model, self.leaves, self.head)]
        kinds = ("grad", "master", "exp_avg", "exp_avg_sq")
        return {"loss", "grad_norm"} | {f"{kind}/{name}" for kind in kinds for name in names}


def minibatch(case: Case, step: int) -> Minibatch:
    """Uneven lengths, one empty response, advantages and log-probs over ten decades, -0.0 and subnormals."""
    rng = random.Random(step)
    vocab = case.model.vocab_size
    samples = []
    for i in range(case.samples):
        prompt = tuple(rng.randrange(vocab) for _ in range(rng.randrange(1, 9)))
        length = 0 if i == 4 else rng.choice((1, 2, 5, 9, 17, 33))
        samples.append(Sample(prompt, tuple(rng.randrange(vocab) for _ in range(length))))
    width = max(len(s.response) for s in samples)
    g = torch.Generator().manual_seed(step)
    mask = torch.tensor([[t < len(s.response) for t in range(width)] for s in samples])
    advantages = torch.randn(case.samples, width, generator=g)
    advantages *= 10.0 ** (torch.rand(case.samples, width, generator=g) * 10 - 6)
    advantages[1, 0], advantages[2, 0] = -0.0, 1e-42
    base = -math.log(vocab)
    batch = LossBatch(
        mask=mask,
        old_logprobs=base + 0.3 * torch.randn(case.samples, width, generator=g),
        advantages=advantages,
        returns=advantages,
        old_values=0.1 * torch.randn(case.samples, width, generator=g),
        ref_logprobs=base + 0.3 * torch.randn(case.samples, width, generator=g),
    )
    return Minibatch(samples=tuple(samples), batch=batch, weights=algorithm().weights(mask))


def algorithm() -> Ppo:
    return Ppo(PpoOptions(kl_loss_coef=0.05, entropy_coef=0.01))


def op_table_of(case: Case, fault: Fault) -> ReferenceOps:
    """`gemm: auto` takes what the self-check of a run takes."""
    if case.mode == "off":
        return FastOps()
    gemm = case.gemm
    if gemm == "auto":
        shapes = [probe_shapes(case.model, case.leaves)]
        gemm = op_table(HardwareConfig(), "layout", shapes, DTYPES[case.precision], torch.device("cpu")).gemm
    return fault.ops(gemm)


def build_role(groups: GroupFactory, case: Case) -> Role:
    """The role of a case; its fault, if any, sits on rank 0."""
    mesh, fault = Mesh.from_config(case.mesh), FAULTS[case.fault]
    context = build_context(
        RoleGroups(groups, [mesh]),
        case.mesh,
        InvarianceConfig(
            mode=case.mode, model_leaves=case.leaves, data_slots=case.slots, leaf_dtype=case.leaf_dtype
        ),
        op_table_of(case, fault if groups.rank == 0 else Fault()),
        DTYPES[case.precision],
        torch.device("cpu"),
    )
    engine = None
    if context is not None:
        make = fault.engine if groups.rank == 0 else Fault().engine
        context = fault.context(context)
        engine = make(
            case.model, case.mesh, context, case.head, max_tokens=case.max_tokens, inv_temperature=1.25
        )
        engine.initialise(7)
    slots = mesh.dp if case.mode == "off" else case.slots
    return Role(name="actor", world=groups.world, mesh=mesh, slots=slots, head=case.head, engine=engine)


def train_step(role: Role, case: Case, step: int) -> LearnReport:
    """One optimizer step with a clip that is always active."""
    optim = OptimConfig(lr=3e-3, clip_grad=0.5, weight_decay=0.1, warmup_steps=2, schedule="cosine")
    batch = minibatch(case, step)
    loss = batch.critic_loss(algorithm()) if case.head == "value" else batch.actor_loss(algorithm())
    with torch.no_grad():
        return learn(role, batch.samples, loss, optim, optim.lr, digest=True)


def run_case(groups: GroupFactory, case: Case) -> Digests:
    """Digests of every step, as this rank sees them."""
    role = build_role(groups, case)
    reports = [train_step(role, case, step) for step in range(case.steps)]
    assert all(r.result.applied and r.result.grad_norm > 0.5 for r in reports), "the clip must be active"
    assert case.head == "value" or all(r.sums["kl_loss"] > 0 for r in reports), "the KL must not vanish"
    return [r.digests for r in reports]


def run_numbers(groups: GroupFactory, case: Case) -> list[tuple[float, float]]:
    """Loss and gradient norm of the first steps, for runs that are near each other and no more."""
    role = build_role(groups, case)
    reports = [train_step(role, case, step) for step in range(2)]
    return [(r.loss, r.result.grad_norm) for r in reports]


MHA = ModelConfig(
    hidden_size=24,
    num_layers=4,
    num_heads=12,
    num_kv_heads=12,
    head_dim=4,
    ffn_size=36,
    vocab_size=29,
    init_std=0.3,
)
GQA = replace(
    MHA, num_heads=12, num_kv_heads=6, qkv_bias=True, qk_norm=True, tie_embeddings=True, num_layers=5
)
