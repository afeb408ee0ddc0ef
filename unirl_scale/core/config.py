"""RunConfig: what was asked. YAML becomes these nested frozen dataclasses and nothing else.

Field names are the YAML keys. `load.py` reads and type-checks them, `check.py` holds the
cross-field rules. Sizes are in elements unless the name says bytes or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """Which vendor runs the job."""

    vendor: Literal["cpu", "cuda", "npu"] = "cpu"
    transport: Literal["vendor", "host"] = (
        "vendor"  # host: Gloo through host memory; ranks may share a device
    )
    threads: int = 1  # intra-op threads a rank on CPU
    gemm: Literal["auto", "whole", "blocked"] = "auto"  # CPU: proved whole-matrix GEMM, or fixed row blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceConfig:
    """The contract of docs/invariance.md."""

    mode: Literal["layout", "run", "off"] = "layout"
    model_leaves: int = 4  # W: leaves of heads / FFN / vocabulary; TP divides W
    data_slots: int = 4  # D: samples of a minibatch are cut into D slots; a DP rank owns whole slots
    leaf_dtype: Literal["fp32", "bf16"] = "fp32"  # rounding of each leaf before the tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer as Llama and Qwen use it. `vocab_size` 0 takes the tokenizer's."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    ffn_size: int = 384
    vocab_size: int = 0
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """One role's layout. Uses ranks first_rank .. first_rank + tp*pp*dp - 1, tp fastest, then dp, then pp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1  # model chunks a pipeline rank (interleaved 1F1B when > 1)
    sequence_parallel: bool = False
    micro_batch_size: int = 1  # samples a micro-batch
    recompute: Literal["none", "block"] = "none"
    pipeline_split: tuple[int, ...] = ()  # layers of each of the pp*vpp chunks; () = as even as it goes
    overlap: bool = True  # dp > 1: gradients travel behind the backward, weights behind the next forward
    bucket_elements: int = 1 << 18  # fewest parameters, here, that travel together; whole layers
    first_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW with a warm-up and a decay."""

    lr: float = 1e-3
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # global norm; 0 = no clipping
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    max_prompt_tokens: int = 64
    max_response_tokens: int = 32
    on_long_prompt: Literal["error", "drop", "truncate"] = (
        "error"  # truncate keeps the last max_prompt_tokens
    )
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    stop: tuple[str, ...] = ()  # besides the end-of-text token
    batch_size: int = 0  # sequences decoded together on a rollout rank; 0 = all
    page_size: int = 64  # tokens of a page of the key-value cache, a power of two
    kv_cache_tokens: int = 0  # tokens that a rollout rank's cache holds; 0 = what the batch needs
    prefill_tokens: int = 8192  # prompt tokens that run together; a longer prompt runs alone
    cuda_graphs: bool = (
        False  # hardware.vendor cuda: replay the decode step; keeps the cache between rollouts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One stretch of training with one algorithm, e.g. an `sft` warm-up before `ppo`.

    `algorithm` is the plug-in's own mapping: `name` plus the fields of its options dataclass.
    """

    name: str = "train"
    num_steps: int = 1
    batch_size: int = 16  # samples a step, over all ranks
    minibatch_size: int = 0  # samples an optimizer step; 0 = batch_size
    epochs: int = 1  # passes over a step's batch
    group_size: int = 1  # samples a prompt
    algorithm: dict[str, Any] = field(default_factory=lambda: {"name": "ppo"})
    optim: OptimConfig = field(default_factory=OptimConfig)
    critic_optim: OptimConfig = field(default_factory=OptimConfig)
    critic_warmup_steps: int = 0  # first steps in which only the critic learns


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """What to do with a reward that is NaN, infinite or None."""

    on_invalid: Literal["drop", "error"] = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Greedy evaluation on held-out prompts, at every stage's start and end and every `every` steps."""

    num_prompts: int = 0
    every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestConfig:
    """SHA-256 of loss, gradients, grad-norm, weights and optimizer state into digests.jsonl, and a comparison
    of all copies of weights and state that ranks must hold alike."""

    every: int = 0  # optimizer steps; 0 = never
    on_mismatch: Literal["stop", "evict"] = "stop"  # copies differ: end the run, or go on without that rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """What happens when ranks are lost, hang or come back; docs/recovery.md."""

    enabled: bool = False
    min_ranks: int = 1  # fewer wait for others to come back
    model_parallel_floor: int = 1  # fewest ranks (tp x pp) that a copy of a model may be cut over
    spares: int = 0  # warm processes besides the ranks, started by our own launcher
    restart: bool = True  # our own launcher starts a lost rank again
    heartbeat_interval_s: float = 0.5
    heartbeat_timeout_s: float = 3.5  # a rank that is silent that long is evicted
    stall_timeout_s: float = 1800.0  # so is one that computes that long between collectives; 0 = never
    regroup_timeout_s: float = 60.0  # survivors must stop what they do, and meet again, within it
    wait_timeout_s: float = 300.0  # to start, and to get back to min_ranks
    max_restarts_per_step: int = 3  # recoveries without a completed step before the run stops
    straggler_ratio: float = 1.5  # report ranks that compute that much longer than the median; 0 = never
    grace_s: float = 25.0  # after SIGTERM or SIGUSR1: save and end within it


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What is kept of a run, how often and where. Intervals are in training steps; 0 = never."""

    dir: str = ""  # of durable checkpoints, on storage that every rank sees; "" = run_dir/checkpoints
    every: int = 0  # durable checkpoints, besides the one at the end
    keep: int = 2  # newest durable checkpoints that stay; 0 = none is ever made
    background: bool = True  # write them while training goes on
    deadline_s: float = 1800.0  # a checkpoint that is not durable by then is given up
    snapshot_every: int = 0  # snapshots in memory that outlive the trainer, each with a copy on another node
    memory_dir: str = "/dev/shm"  # where those lie on each host
    resume: str = "auto"  # auto: continue what run_dir holds; never; must; or the path of a checkpoint
    allow_data_change: bool = False  # resume although the training data is another


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """Actor and critic are models of their own."""

    actor: ModelConfig = field(default_factory=ModelConfig)
    critic: ModelConfig | None = None  # None = the actor's shape
    actor_path: str = ""  # Hugging Face directory to start from; an actor that is left out takes its sizes
    critic_path: str = ""  # the same; without a value head there, that one starts fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshesConfig:
    """A mesh for each role. None: critic and reference as actor; rollout = actor's tp, the rest dp."""

    actor: MeshConfig = field(default_factory=MeshConfig)
    critic: MeshConfig | None = None
    reference: MeshConfig | None = None
    rollout: MeshConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything a run needs. `task` is the plug-in's own mapping: `name` plus its options."""

    seed: int = 0
    run_dir: str = "runs/run"
    precision: Literal["fp32", "bf16"] = "fp32"
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    invariance: InvarianceConfig = field(default_factory=InvarianceConfig)
    model: ModelsConfig = field(default_factory=ModelsConfig)
    mesh: MeshesConfig = field(default_factory=MeshesConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    task: dict[str, Any] = field(default_factory=lambda: {"name": "reasoning_gym"})
    stages: tuple[StageConfig, ...] = (StageConfig(),)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    digest: DigestConfig = field(default_factory=DigestConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
