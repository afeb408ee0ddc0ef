"""What a model weighs and costs: parameters, FLOPs and memory of a pipeline stage.

FLOPs count multiplications and additions; causal attention counts half (2 * S * heads * head_dim a token for
QK^T and PV together). Backward is twice forward. Activations are what our own layers keep for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unirl_scale.core.config import MeshConfig, ModelConfig, RunConfig

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters and FLOPs by part.

    Attributes:
        critic: scores values rather than tokens.
        layer_params, layer_matmul_params: of one transformer block; the second takes part in GEMMs.
        layer_norm_params: of one block; whole on every tp rank, as the final norm is.
        embedding_params: vocabulary (padded to the model leaves) x hidden.
        head_params: of the output layer; 0 when tied to the embedding.
        head_matmul_params: the same as GEMM work.
    """

    config: ModelConfig
    vocab: int
    critic: bool
    layer_params: int
    layer_matmul_params: int
    layer_norm_params: int
    embedding_params: int
    head_params: int
    head_matmul_params: int

    @property
    def params(self) -> int:
        """All parameters."""
        norm = self.config.hidden_size
        return self.config.num_layers * self.layer_params + self.embedding_params + self.head_params + norm

    def forward_flop(self, sequence: int, layers: int, *, head: bool) -> float:
        """FLOP a token for `layers` blocks, with the output layer or not, at this sequence length."""
        attention = 2.0 * sequence * self.config.num_heads * self.config.head_dim
        flop = layers * (2.0 * self.layer_matmul_params + attention)
        return flop + (2.0 * self.head_matmul_params if head else 0.0)

    def train_flop(self, sequence: int) -> float:
        """FLOP a token of forward and backward over the whole model, without recomputation (MFU's count)."""
        return 3 * self.forward_flop(sequence, self.config.num_layers, head=True)


def model_size(config: ModelConfig, leaves: int, *, critic: bool = False) -> ModelSize:
    """Sizes of the model. A critic's output layer is one value a token."""
    h, d = config.hidden_size, config.head_dim
    attention = h * d * (config.num_heads + 2 * config.num_kv_heads) + config.num_heads * d * h
    mlp = 3 * h * config.ffn_size
    bias = d * (config.num_heads + 2 * config.num_kv_heads) if config.qkv_bias else 0
    norms = 2 * h + (2 * d if config.qk_norm else 0)
    vocab = -(-config.vocab_size // leaves) * leaves
    head = h if critic else vocab * h
    return ModelSize(
        config=config,
        vocab=vocab,
        critic=critic,
        layer_params=attention + mlp + bias + norms,
        layer_matmul_params=attention + mlp,
        layer_norm_params=norms,
        embedding_params=vocab * h,
        head_params=0 if config.tie_embeddings and not critic else head,
        head_matmul_params=head,
    )


def chunk_layers(model: ModelConfig, mesh: MeshConfig) -> tuple[int, ...]:
    """Layers of each of the pp * vpp chunks: as given, else as even as it goes, the larger ones first."""
    chunks = mesh.pp * mesh.vpp
    if mesh.pipeline_split:
        return mesh.pipeline_split
    quotient, rest = divmod(model.num_layers, chunks)
    return tuple(quotient + (i < rest) for i in range(chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """What the dp rank with the most samples runs in one optimizer step.

    Attributes:
        count: micro-batches; one never crosses a data slot.
        samples: of all of them.
        largest: samples of the largest.
    """

    count: int
    samples: int
    largest: int

    @property
    def mean(self) -> float:
        """Samples of a micro-batch."""
        return self.samples / self.count

    @classmethod
    def of(cls, samples: int, slots: int, dp: int, size: int) -> MicroBatches:
        """Of `samples` over `slots` data slots and `dp` ranks, at most `size` in a micro-batch."""
        held = -(-slots // dp)  # the first rank's, whose slots are the fullest
        each, more = divmod(samples, slots)
        full = min(held, more)  # slots with one sample more
        return cls(
            count=max(1, full * -(-(each + 1) // size) + (held - full) * -(-each // size)),
            samples=max(1, held * each + full),
            largest=max(1, min(size, each + (full > 0))),
        )


def stage_layers(chunks: Sequence[int], pp: int) -> tuple[int, ...]:
    """Layers of each stage: chunk c runs on stage c mod pp."""
    return tuple(sum(chunks[s::pp]) for s in range(pp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank of a stage, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    kv_cache: float
    communicators: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.kv_cache)
        return sum(parts) + self.communicators


def samples_per_step(cfg: RunConfig) -> int:
    """Samples of one optimizer step of the last stage."""
    return cfg.stages[-1].minibatch_size or cfg.stages[-1].batch_size


def sequence_tokens(cfg: RunConfig) -> int:
    """Tokens of a whole sample: prompt and response at their longest."""
    return cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens


def stage_params(size: ModelSize, mesh: MeshConfig, stage: int) -> float:
    """Parameters on one rank of the stage."""
    layers = stage_layers(chunk_layers(size.config, mesh), mesh.pp)[stage]
    params = float(layers * size.layer_params)
    last = stage == mesh.pp - 1
    if stage == 0:
        params += size.embedding_params
    if last:
        params += size.head_params + size.config.hidden_size
        if not size.head_params and mesh.pp > 1:  # tied weights, a copy on the last stage
            params += size.embedding_params
    return params / mesh.tp


def activation_bytes_per_token(config: ModelConfig, mesh: MeshConfig, itemsize: int) -> float:
    """Kept for backward by one block, a token on one rank: the block's input and residual, normed inputs,
    q k v, attention output, gate and up, and the log-sum-exp in fp32. With block recomputation: the input."""
    h, d = config.hidden_size, config.head_dim
    replicated = h if mesh.recompute == "block" else 4 * h
    split = 0
    if mesh.recompute == "none":
        split = d * (2 * config.num_heads + 2 * config.num_kv_heads) + 3 * config.ffn_size
    rows = replicated / (mesh.tp if mesh.sequence_parallel else 1) + split / mesh.tp
    return rows * itemsize + (4 * config.num_heads / mesh.tp if mesh.recompute == "none" else 0)


def training_memory(
    cfg: RunConfig, size: ModelSize, mesh: MeshConfig, stage: int, micros: MicroBatches
) -> Memory:
    """Memory of a role that trains. Optimizer state is sharded over dp: fp32 master (bf16 only) and moments.

    1F1B keeps pp - stage micro-batches in flight; interleaving adds (pp - 1) / (pp * vpp) of them.
    """
    itemsize = 4 if cfg.precision == "fp32" else 2
    params = stage_params(size, mesh, stage)
    flight = min(mesh.pp - stage, micros.count) * (1 + (mesh.pp - 1) / (mesh.pp * mesh.vpp) * (mesh.vpp > 1))
    layers = stage_layers(chunk_layers(size.config, mesh), mesh.pp)[stage]
    tokens = micros.largest * sequence_tokens(cfg)
    kept = flight * layers * tokens * activation_bytes_per_token(size.config, mesh, itemsize)
    if mesh.recompute == "block":  # one block's activations exist while it is recomputed
        whole = MeshConfig(tp=mesh.tp, sequence_parallel=mesh.sequence_parallel)
        kept += tokens * activation_bytes_per_token(size.config, whole, itemsize)
    if stage == mesh.pp - 1:
        kept += tokens * size.head_matmul_params / size.config.hidden_size / mesh.tp * 4 * 2  # logits, fp32
    state = 8.0 + (4.0 if itemsize == 2 else 0.0)
    return Memory(
        weights=params * itemsize,
        gradients=params * 4.0,
        optimizer=params * state / mesh.dp,
        activations=kept,
        kv_cache=0.0,
    )


def inference_memory(cfg: RunConfig, size: ModelSize, mesh: MeshConfig, stage: int, sequences: int) -> Memory:
    """Memory of a role that only runs forward; `sequences` decoded together on a DP rank need a KV cache."""
    itemsize = 4 if cfg.precision == "fp32" else 2
    layers = stage_layers(chunk_layers(size.config, mesh), mesh.pp)[stage]
    kv = 2.0 * layers * size.config.num_kv_heads * size.config.head_dim / mesh.tp * itemsize
    tokens = mesh.micro_batch_size * sequence_tokens(cfg)
    return Memory(
        weights=stage_params(size, mesh, stage) * itemsize,
        gradients=0.0,
        optimizer=0.0,
        activations=tokens * size.config.hidden_size * itemsize * 8.0,
        kv_cache=kv * sequences * sequence_tokens(cfg),
    )
