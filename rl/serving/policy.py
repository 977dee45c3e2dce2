"""The policy that a server serves: a run directory's as recorded, with its newest weights; or a model alone."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
from flax import nnx

from axlearn_like.checkpoint.pretrained import pretrained_source
from axlearn_like.checkpoint.reader import restore_params
from axlearn_like.checkpoint.versions import NoCheckpoint, SavedWeights, find_version, split_version
from axlearn_like.config import REQUIRED, ConfigBase, Configurable, config_name, from_text, to_text, walk_configs
from axlearn_like.layers.base import Params, first_params, split
from axlearn_like.layers.heads import EmbeddingHead, ScoreHead
from axlearn_like.run.directory import RunDirectory
from axlearn_like.tokenizers.embedding import check_tokenizer
from axlearn_like.tokenizers.protocol import Tokenizer, completion_text
from axlearn_like.training.program import check_length, most_positions
from axlearn_like.training.trainer import Trainer
from mesh import UserError, make_mesh, to_named_sharding
from mesh.programs.interruptible import begun_in_threads
from rl.rollout.engine import RolloutEngine
from rl.rollout.model_runner.adapter_bank import AdapterLimits
from rl.rollout.sampling import Sampler
from rl.tasks.mixture import TaskMixture

if TYPE_CHECKING:  # imports take 0.3 s, which a model's server can spare
    from rl.experiment import RLExperiment

WarmUp = Literal["none", "background", "full"]

_COMPILING = 2  # programs at a time


def find_run(name: str | Path) -> RunDirectory | None:
    """Return the run that a name of saved weights is of (`checkpoint.versions`); None for any other."""
    path = split_version(name)[0].absolute()
    if not path.is_dir():
        return None
    for folder in (path, *list(path.parents)[:4]):  # checkpoints/rl/best/STEP
        run = RunDirectory.attach(folder)
        if run.config_path.is_file():
            return run
    return None


def recorded_config(run: RunDirectory) -> "RLExperiment.Config | ServedModel.Config":
    """Return the run's experiment, or a supervised one's policy (UserError: another kind, or not readable)."""
    return policy_config(from_text(run.read_config()), run.path)


def policy_config(cfg: ConfigBase[Any], path: Path) -> "RLExperiment.Config | ServedModel.Config":
    """Return an experiment that has run at this path, or a supervised one's policy (UserError: another kind)."""
    from rl.experiment import RLExperiment

    if isinstance(cfg, Trainer.Config):
        return supervised_policy(cfg, path)
    if not isinstance(cfg, RLExperiment.Config):
        raise UserError(
            f"{path} is a run of {config_name(cfg)}; what draws answers needs the prompts and stop tokens of one of "
            "rl.experiment:RLExperiment, or the tokenizer of one of axlearn_like.training.trainer:Trainer"
        )
    return cfg


def supervised_policy(cfg: Trainer.Config, path: Path) -> "ServedModel.Config":
    """Return how to ask a supervised run's model, with its tasks (UserError: no words, or not one tokenizer)."""
    head = getattr(cfg.model, "head", None)
    if isinstance(head, ScoreHead.Config | EmbeddingHead.Config):
        raise UserError(f"{path} is a run of a model with {type(head).__owner__.__name__}, which draws no words")
    nodes = [node for _, node in walk_configs(cfg.input)]
    named: list[Any] = [getattr(node, "tokenizer", None) for node in nodes]
    tokenizers = _distinct(one for one in named if isinstance(one, ConfigBase))
    if len(tokenizers) != 1:
        raise UserError(
            f"{path} is a supervised run whose data name {len(tokenizers)} tokenizers; expected one, by which prompts "
            "are made. An RL experiment with start_from=StartFrom.Config(path=...) of this run can name its own"
        )
    tasks = _distinct(node for node in nodes if isinstance(node, TaskMixture.Config))
    length, most = cfg.input.seq_len, most_positions(cfg.model)
    length = length if most is None else max(1, min(length, most // 2))  # a prompt, and an answer to it
    return ServedModel.Config(
        policy=cfg.model,
        tokenizer=tokenizers[0],
        max_prompt_tokens=length,
        max_new_tokens=length,
        tasks=tasks[0] if len(tasks) == 1 else None,
        seed=cfg.seed,
    )


def _distinct[C: ConfigBase](found: Iterable[C | None]) -> list[C]:
    """Return the configs among these, each once."""
    return list({to_text(one): one for one in found if one is not None}.values())


def newest_weights(run: RunDirectory, name: str | Path | None = None) -> SavedWeights | None:
    """Return the newest weights of a run: of RL, else supervised, else of its warm start; None before there are any.

    `name` names others of the run, see `checkpoint.versions`.

    Raises:
        CheckpointError: there are none of this name.
    """
    name = run.path if name is None else name
    try:
        return find_version(name)
    except NoCheckpoint:
        if split_version(name) == (Path(name).expanduser(), None) and Path(name).absolute() == run.path.absolute():
            return None
        raise


class ServedModel(Configurable):
    """A model without the tasks and the learner of an experiment: a policy, its tokenizer and the sizes of an engine.

    Its parameters are those that the policy begins with.
    """

    class Config(ConfigBase["ServedModel"], renamed={"max_prompt": "max_prompt_tokens", "max_new": "max_new_tokens"}):
        policy: ConfigBase = REQUIRED
        tokenizer: ConfigBase = REQUIRED
        max_prompt_tokens: int = 1024  # limit of a prompt's tokens
        max_new_tokens: int = 1024  # limit of an answer's tokens, the stop token included
        sampler: Sampler.Config = Sampler.Config()
        engine: RolloutEngine.Config = RolloutEngine.Config(max_num_seqs=16)
        start_from: None = None  # the policy says it
        tasks: TaskMixture.Config | None = None  # tasks of its training, for an evaluation on held-out problems
        seed: int = 0  # random seed of parameters, if they are random

        def check(self) -> None:
            """Refuse a tokenizer or lengths that the policy has no room for."""
            super().check()
            check_tokenizer(self.tokenizer, self.policy)
            check_length(
                self.policy,
                self.max_prompt_tokens + self.max_new_tokens,
                "max_prompt_tokens + max_new_tokens",
                "policy",
            )

        def check_fields(self) -> None:
            """Refuse lengths that no engine can have."""
            self.require_least(1, "max_prompt_tokens", "max_new_tokens")

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.tokenizer: Tokenizer = cfg.tokenizer.build()
        self.engine_cfg = cfg.engine.filled_from(
            cfg, model=cfg.policy, stop_tokens=self.tokenizer.stop_ids, sampler=cfg.sampler
        )

    def make_engine(self, adapters: AdapterLimits | None = None, **changes: Any) -> RolloutEngine:
        """Build a rollout engine with room for adapters; `changes` are fields of its config."""
        decode = partial(completion_text, self.tokenizer)
        return self.engine_cfg.clone(**changes).build(decode=decode, adapters=adapters)


def load_params(
    experiment: "RLExperiment | ServedModel",
    weights: SavedWeights | None,
    mesh: jax.sharding.Mesh,
    like: Params | None = None,
) -> Params:
    """Return parameters sharded over `mesh`; without weights, those that the experiment starts from, or random ones.

    Args:
        weights: weights of a run; None: there are none.
        like: template of an engine: arrays that it takes with the least copying, where they need not be those of a
            trainer.

    Raises:
        CheckpointError: damaged, or of another policy.
    """
    cfg = experiment.cfg

    def create(key: jax.Array) -> Params:
        return split(cfg.policy.build(rngs=nnx.Rngs(key)))[1]

    with jax.set_mesh(mesh):
        start = cfg.start_from or pretrained_source(cfg.policy)
        described = to_named_sharding(jax.eval_shape(create, jax.random.key(0)), mesh)
        if weights is not None:
            return restore_params(weights.path, described)
        if start is None:
            return first_params(create, cfg.seed, described)
        return start.build().params(described if like is None else like)


def make_engine(
    experiment: "RLExperiment | ServedModel",
    weights: SavedWeights | None,
    adapters: AdapterLimits | None = None,
    warmup: WarmUp = "none",
) -> tuple[RolloutEngine, list[Callable[[], None]]]:
    """Return the experiment's engine with weights (None: random ones), and functions that compile the rest beside it.

    Programs are compiled while the weights are read, which waits for the disk: with `full` all that requests can need,
    with `background` two that fit every request, with `none` none, so that requests wait for the compiler.
    """
    # A conversation continues with its next question.
    engine = experiment.make_engine(adapters=adapters, keep_completions=True)
    needed, rest = ([], []) if warmup == "none" else engine.executor.compilations()
    ahead, later = ([*needed, *rest], []) if warmup == "full" else (needed, rest)
    # Weights that are damaged are said to be at once, and Ctrl-C ends the process, whatever is being compiled.
    with begun_in_threads(lambda compile_one: compile_one(), ahead, _COMPILING) as compiled:
        params = load_params(experiment, weights, make_mesh(engine.cfg.mesh), engine.runner.weights_like)
        engine.set_weights(params, 0 if weights is None else weights.version)
        compiled()
        engine.executor.run_idle()
    return engine, later
