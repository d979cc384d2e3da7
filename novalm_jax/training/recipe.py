"""How a small Mixture-of-Experts language model is trained: a recipe, to be read from top to bottom.

Model, loss, optimiser, update, validation, checkpoints, the run. The network is the one that runs everywhere else in
this package, with an expert computation that is differentiable and does the work of the chosen experts alone.
Whatever moment a run dies at, the same call goes on from its last checkpoint and gives the same curve: batches, split
and first weights are drawn from one seed. One thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from flax import nnx

from novalm_jax.checkpoint.atomic import settle
from novalm_jax.checkpoint.load import abstract_model
from novalm_jax.checkpoint.progress import steps_bar
from novalm_jax.checkpoint.write import save_model
from novalm_jax.config import ModelConfig
from novalm_jax.errors import EngineError, OptionError
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.families import find_family
from novalm_jax.models.moe import RouterTrace
from novalm_jax.models.params import parameters_of
from novalm_jax.options import ModelShape, TrainOptions
from novalm_jax.training.data import Corpus, batch
from novalm_jax.training.ngrams import baselines
from novalm_jax.training.run_folder import TOKENIZER, Log, hold, open_checkpoints, open_corpus

Parameters = Mapping[str, jax.Array]
"""The trainable arrays of a model, by path, such as `layers.0.attention.q.weight`."""


# --- model -----------------------------------------------------------------------------------------------------------


def config_json(options: ModelShape, vocab_size: int, biased: bool = False) -> dict[str, Any]:
    """The config.json of a model: qwen3_moe, or glm4_moe where biases balance the experts."""
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": options.hidden_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.hidden_size // options.heads,
        "hidden_act": "silu",
        "max_position_embeddings": options.context_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "moe_intermediate_size": options.expert_width,
        "intermediate_size": options.expert_width * options.experts_per_token,
        "num_experts_per_tok": options.experts_per_token,
        "norm_topk_prob": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    if not biased:
        own = {"num_experts": options.experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | config | own
    own = {"n_routed_experts": options.experts, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1}
    own |= {"topk_group": 1, "routed_scaling_factor": 1.0, "use_qk_norm": True, "partial_rotary_factor": 1.0}
    return {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"} | config | own


# --- loss ------------------------------------------------------------------------------------------------------------


class Losses(NamedTuple):
    """Means over tokens, and over layers, float32; `total` is minimised.

    `load [layers, e]` is no loss: which part of all choices fell on each expert.
    """

    total: jax.Array
    next_token: jax.Array
    balance: jax.Array
    router_z: jax.Array
    load: jax.Array


def losses(model: Decoder, tokens: jax.Array, options: TrainOptions) -> Losses:
    """Of `tokens [b, t + 1]`, each predicted from those before it."""
    logits, traces = model.traced(tokens[:, :-1])
    next_token = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    load = jnp.stack([expert_counts(trace) / trace.ids.size for trace in traces])
    balance = jnp.stack([balance_loss(trace, part) for trace, part in zip(traces, load, strict=True)]).mean()
    router_z = jnp.stack([jnp.square(jax.nn.logsumexp(trace.logits, axis=-1)).mean() for trace in traces]).mean()
    total = next_token + options.balance_loss * balance + options.router_z_loss * router_z
    return Losses(total, next_token, balance, router_z, load)


def expert_counts(trace: RouterTrace, real: jax.Array | None = None) -> jax.Array:
    """How many choices fell on each expert, float32 `[e]`; of the tokens that bool `real [t]` names (None: all)."""
    counted = jnp.ones(trace.ids.shape[0]) if real is None else real.astype(jnp.float32)
    return jnp.zeros(trace.logits.shape[-1]).at[trace.ids].add(jnp.broadcast_to(counted[:, None], trace.ids.shape))


def balance_loss(trace: RouterTrace, load: jax.Array) -> jax.Array:
    """e times the sum over experts of load and mean probability: 1 where both are even (arXiv:2101.03961, eq. 4)."""
    return load.size * (load * jax.nn.softmax(trace.logits, axis=-1).mean(axis=0)).sum()


# --- optimiser -------------------------------------------------------------------------------------------------------


def make_optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) on clipped gradients; the rate warms up, then falls along a cosine."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, options.warmup, options.steps, options.learning_rate / 10
    )
    chain = optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=options.weight_decay, mask=decays),
    )

    def update(gradient: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        # Optax mixes the int32 count of steps with floats, which a strict program forbids.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(gradient, state, parameters)

    return optax.GradientTransformation(chain.init, update)


def decays(parameters: Parameters) -> dict[str, bool]:
    """Which parameters decay: matrices, not norms and biases."""
    return {path: not path.endswith(("scale", "bias")) for path in parameters}


def move_choice_biases(parameters: Parameters, load: jax.Array, step: float) -> Parameters:
    """Biases of idle experts rise, those of busy ones fall, all by the same step (arXiv:2408.15664, algorithm 1)."""
    moves = jnp.sign(load.mean(axis=-1, keepdims=True) - load) * step
    paths = [f"layers.{layer}.feed_forward.choice_bias" for layer in range(len(load))]
    return dict(parameters) | {path: parameters[path] + move for path, move in zip(paths, moves, strict=True)}


# --- update and validation -------------------------------------------------------------------------------------------


class TrainState(NamedTuple):
    """All that changes from one update to the next."""

    parameters: Parameters
    optimizer: optax.OptState


class Trainer:
    """The compiled programs of a run, and the state it begins with."""

    def __init__(self, config: ModelConfig, options: TrainOptions):
        self._config = config
        self._options = options
        self._optimizer = make_optimizer(options)
        self.update = jax.jit(self._update, donate_argnums=0)
        self.validate = jax.jit(self._validate)

    def first_state(self) -> TrainState:
        """Random weights from the seed."""
        model = Decoder(self._config, rngs=nnx.Rngs(self._options.seed))
        parameters = {path: param.get_value() for path, param in parameters_of(model).items()}
        return TrainState(parameters, self._optimizer.init(parameters))

    def model(self, parameters: Parameters, dtype: str | None = None) -> Decoder:
        """The module with these weights, in the dtype that is computed in; some parameters are float32 in any."""
        model = abstract_model(self._config, dtype or self._options.dtype)
        for path, param in parameters_of(model).items():
            param.set_value(parameters[path].astype(param.dtype))
        return model

    def _update(self, state: TrainState, tokens: jax.Array) -> tuple[TrainState, Losses, jax.Array]:
        """One step on `tokens [b, t + 1]`: the state that follows, means of the losses, and the gradient's norm."""
        options = self._options

        def total(parameters: Parameters, part: jax.Array) -> tuple[jax.Array, Losses]:
            found = losses(self.model(parameters), part, options)
            return found.total, found

        def add_part(sums: tuple[Parameters, Losses], part: jax.Array) -> tuple[tuple[Parameters, Losses], None]:
            gradient, found = jax.grad(total, has_aux=True)(state.parameters, part)
            return jax.tree.map(lambda a, b: a + b / options.accumulate, sums, (gradient, found)), None

        zero = jnp.zeros(())
        nothing = Losses(zero, zero, zero, zero, jnp.zeros((options.layers, options.experts)))
        parts = tokens.reshape(options.accumulate, -1, tokens.shape[-1])
        sums = (jax.tree.map(jnp.zeros_like, state.parameters), nothing)
        (gradient, found), _ = jax.lax.scan(add_part, sums, parts)
        changes, optimizer = self._optimizer.update(gradient, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, changes)
        if options.balance_bias:
            parameters = move_choice_biases(parameters, found.load, options.balance_bias)
        return TrainState(parameters, optimizer), found, optax.tree.norm(gradient)

    def _validate(self, parameters: Parameters, tokens: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of `tokens [b, t + 1]`, where bool `real [b, t]`: the sum of losses, and choices of experts `[layers, e]`."""
        logits, traces = self.model(parameters).traced(tokens[:, :-1])
        found = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.where(real, found, 0.0).sum(), jnp.stack([expert_counts(each, real.reshape(-1)) for each in traces])


class Validation(NamedTuple):
    """On the whole validation text: mean loss, and the part of choices that fell on each expert, `[layers][e]`."""

    nats_per_token: float
    bits_per_byte: float
    load: list[list[float]]


def validate(trainer: Trainer, parameters: Parameters, corpus: Corpus, options: TrainOptions) -> Validation:
    """Every token of the validation text, predicted from those before it in its window."""
    rows, length = options.batch_size // options.accumulate, options.context_length
    count = len(corpus.valid) - 1
    windows = -(-count // length)
    places = np.arange(-(-windows // rows) * rows)[:, None] * length + np.arange(length + 1)[None]
    tokens, real = corpus.valid[np.minimum(places, count)], places[:, 1:] <= count
    parts = [slice(start, start + rows) for start in range(0, len(tokens), rows)]
    found = [jax.device_get(trainer.validate(parameters, tokens[part], real[part])) for part in parts]
    total, counts = sum(float(loss) for loss, _ in found), np.sum([counts for _, counts in found], axis=0)
    load = (counts / counts.sum(axis=1, keepdims=True)).tolist()
    return Validation(total / count, total / np.log(2) / corpus.valid_bytes, load)


# --- the run ---------------------------------------------------------------------------------------------------------


def train(texts: Sequence[str | Path], output: str | Path, options: TrainOptions) -> Path:
    """Trains, or goes on training, and writes the model.

    Args:
      texts: files of UTF-8 text, also compressed with xz.
      output: folder for run.json, the tokenizer, checkpoints (`state`), metrics.jsonl and, in the end, the model.
      options: what is trained, and how; of a run that goes on the ones it began with.

    Returns:
      The Hugging Face folder of the model, float32.

    Raises:
      OptionError: a text cannot be read or is too short, or `output` holds another run.
      EngineError: the loss is no number any more; the last checkpoint is kept.
      WriteError: a file cannot be written.
    """
    if isinstance(texts, str | Path):
        raise OptionError("texts: expected a list of files.")
    paths, output = [Path(text) for text in texts], Path(output)
    model_folder = output / "model"
    with hold(output, paths, options):
        if model_folder.exists():
            settle(model_folder)
            return model_folder
        corpus = open_corpus(output, paths, options)
        raw = config_json(options, corpus.tokenizer.get_vocab_size(), options.balance_bias > 0)
        trainer = Trainer(find_family(raw).read_config(raw), options)
        with open_checkpoints(output / "state") as checkpoints:
            parameters = _run(trainer, corpus, output, options, checkpoints)
        return save_model(trainer.model(parameters, "float32"), model_folder, config=raw, files_from=output / TOKENIZER)


def _run(
    trainer: Trainer, corpus: Corpus, output: Path, options: TrainOptions, checkpoints: ocp.CheckpointManager
) -> Parameters:
    """All updates that are left, and the weights after the last one."""
    state, done = trainer.first_state(), checkpoints.latest_step() or 0
    if done:
        state = checkpoints.restore(done, args=ocp.args.StandardRestore(state))
    log = Log(output, done)
    if not done:
        log.write(0, "baselines", {"losses": baselines(corpus)})
    with steps_bar("training", options.steps, done) as bar:
        for step in range(done + 1, options.steps + 1):
            start = time.perf_counter()
            tokens = batch(corpus.train, options.context_length, options.batch_size, step - 1, options.seed)
            state, found, norm = trainer.update(state, tokens)
            named = {name: float(value) for name, value in found._asdict().items() if name != "load"}
            seconds = time.perf_counter() - start
            if not math.isfinite(named["total"] + float(norm)):
                raise EngineError(
                    f"training: the loss of step {step} is {named['total']}, and its gradient {float(norm)}. Begin "
                    f"anew with a learning_rate below {options.learning_rate}."
                )
            log.write(step, "update", named | {"gradient_norm": float(norm), "seconds": seconds})
            speed = round(options.batch_size * options.context_length / seconds)
            bar.set_postfix(loss=f"{named['next_token']:.3f}", tokens_per_second=speed)
            bar.update()
            if step == options.steps or step % options.evaluate_every == 0:
                log.write(step, "validation", validate(trainer, state.parameters, corpus, options)._asdict())
            if step == options.steps or step % options.save_every == 0:
                checkpoints.save(step, args=ocp.args.StandardSave(state))
    return state.parameters
