"""Functions that a config's text may name and call: by a decorator, a table of libraries, or a package.

An installed package declares experiments, environments and verifiers by entry points, which give them names as well:

    [project.entry-points."axl.verifiers"]
    units = "mylab.scores:units"

A text may come from anyone, and it chooses what a function is called with. So a name must have been declared here or
at the function itself: that a module happens to have it is not enough.
"""

import functools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from mesh.errors import UserError, did_you_mean

Group = Literal["experiments", "environments", "verifiers"]
_GROUPS: tuple[Group, ...] = ("experiments", "environments", "verifiers")

# Public name of a module -> functions and types of it. All of them only compute: given any arguments, even one another,
# they import, open, unpickle and start nothing.
LIBRARIES = {
    "builtins": "bool float int str",
    "jax.numpy": """
        bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool_ abs cos exp log
        sign sin sqrt square tanh
    """,
    "jax.nn": """
        celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
        log_softmax logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus
        sparse_sigmoid squareplus standardize swish tanh
    """,
    "jax.nn.initializers": """
        constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform kaiming_normal
        kaiming_uniform lecun_normal lecun_uniform normal ones orthogonal truncated_normal uniform
        variance_scaling xavier_normal xavier_uniform zeros
    """,
    "optax": """
        adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan adaptive_grad_clip
        add_decayed_weights add_noise amsgrad apply_every apply_if_finite centralize chain clip
        clip_by_block_rms clip_by_global_norm constant_schedule cosine_decay_schedule cosine_onecycle_schedule
        ema exponential_decay flatten freeze fromage identity inject_hyperparams join_schedules
        keep_params_nonnegative lamb lars linear_onecycle_schedule linear_schedule lion masked nadam nadamw
        named_chain noisy_sgd normalize_by_update_norm novograd optimistic_adam_v2 optimistic_gradient_descent
        partition per_example_global_norm_clip piecewise_constant_schedule piecewise_interpolate_schedule
        polyak_sgd polynomial_schedule radam rmsprop rprop scale scale_by_adadelta scale_by_adam scale_by_adamax
        scale_by_adan scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients scale_by_factored_rms
        scale_by_learning_rate scale_by_lion scale_by_novograd scale_by_optimistic_gradient
        scale_by_param_block_norm scale_by_param_block_rms scale_by_polyak scale_by_radam scale_by_rms
        scale_by_rprop scale_by_rss scale_by_schedule scale_by_sign scale_by_sm3 scale_by_stddev
        scale_by_trust_ratio scale_by_yogi selective_transform set_to_zero sgd sgdr_schedule sign_sgd signum sm3
        trace warmup_constant_schedule warmup_cosine_decay_schedule warmup_exponential_decay_schedule yogi
        zero_nans
    """,
    "optax.contrib": """
        acprop ademamix adopt cocob dadapt_adamw dog dowg dpsgd galore madgrad mechanize momo momo_adam muon
        normalize prodigy sam scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob scale_by_galore
        scale_by_madgrad scale_by_muon scale_by_simplified_ademamix schedule_free schedule_free_adamw
        schedule_free_sgd simplified_ademamix sophia split_real_and_imaginary
    """,
}
_NAMES = {f"{module}:{name}" for module, names in LIBRARIES.items() for name in names.split()}

_OURS: dict[str, Callable[..., Any]] = {}


def config_function[F: Callable[..., Any]](function: F) -> F:
    """Let the text of a config name this function, and call it with any values that the text gives.

    For functions that only compute. A user's own files and packages need no declaration: they are trusted as a whole,
    once the user has named them.

        @config_function
        def digit_share(problem_id: int, answer: str) -> float: ...
    """
    _OURS[_place(function)] = function
    return function


def declared_in_library(name: str) -> bool:
    """Return True for `module:name` of a library that a text may name."""
    return name in _NAMES


def is_ours_declared(found: Any) -> bool:
    """Return True for a function that `config_function` has marked."""
    return _OURS.get(_place(found)) is found


def nearest_declared(name: str) -> str:
    """Return "; did you mean ...?" with declared names like this one, or ""."""
    module, _, qualname = name.partition(":")
    root = module.partition(".")[0]
    same = [known for known in (*_NAMES, *_OURS) if known.partition(":")[2] == qualname and known.startswith(root)]
    return did_you_mean(same[0] if same else name, (*_NAMES, *_OURS))


def _place(function: Any) -> str:
    return f"{getattr(function, '__module__', None)}:{getattr(function, '__qualname__', None)}"


@functools.cache
def installed(group: Group) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name; nothing of a package is imported.

    Raises:
        UserError: two packages declare one name.
    """
    found: dict[str, EntryPoint] = {}
    for one in entry_points(group=f"axl.{group}"):
        if found.setdefault(one.name, one).value != one.value:
            raise UserError(
                f"axl.{group}: {one.name!r} is {found[one.name].value} and {one.value}; uninstall one package"
            )
    return dict(sorted(found.items()))


def place_of(group: Group, name: str) -> str:
    """Return `module:name` of a declared object.

    Raises:
        UserError: no installed package declares it; gives the nearest names.
    """
    known = installed(group)
    if name not in known:
        raise UserError(f"no installed package declares {name!r} in axl.{group}{did_you_mean(name, known)}")
    return known[name].value


def declared_in_package(name: str) -> bool:
    """Return True if an entry point leads to `module:qualname`, or to the class that has this as its `Config`."""
    declared = name.removesuffix(".Config")
    return any(one.value == declared for group in _GROUPS for one in installed(group).values())
