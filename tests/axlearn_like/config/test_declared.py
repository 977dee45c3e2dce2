"""Names in a config's text: all that is declared is harmless, and nothing else is reached."""

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from axlearn_like.config import ConfigError, config_for, from_text, to_text, trusted_code
from axlearn_like.config.declared import LIBRARIES, is_ours_declared
from axlearn_like.config.errors import ImportNameError
from axlearn_like.config.names import import_name, qualified_name
from axlearn_like.config.trusted_code import OWN
from axlearn_like.learner.optimizers.elementwise import Optax

# Prints what Python's audit hooks report while a script says so: imports, files, processes, connections, pickles. Left
# out is what libraries do to themselves: modules that they import late, and their own sources, read for tracebacks.
WATCH = """
import inspect, json, logging, pathlib, sys, warnings
import optax
warnings.simplefilter("ignore")
logging.disable()
seen, watching, current = {}, False, ""
LIBRARIES_AT = tuple({str(pathlib.Path(m.__file__).parents[1]) for m in (optax, json)})
HARMLESS = ("object.", "sys._getframe", "code.__new__", "builtins.id", "gc.", "cpython.", "compile", "marshal.loads")

def of_library(event, args):
    if event in ("open", "os.listdir", "os.scandir"):
        return str(args[0]).startswith(LIBRARIES_AT) and (event != "open" or args[1] in ("r", "rb"))
    if event == "exec":
        return args[0].co_filename.startswith((*LIBRARIES_AT, "<frozen", "<string>", "<lambda"))
    return event == "import" and args[0].partition(".")[0] in ("jax", "jaxlib", "optax", "numpy", "scipy", "chex")

def hook(event, args):
    if watching and not event.startswith(HARMLESS) and not of_library(event, args):
        seen.setdefault(f"{event} {args[0] if args else ''}"[:200], current)

sys.addaudithook(hook)
"""

WALK = """
import jax, jax.numpy as jnp, numpy as np, optax, optax.contrib
import axlearn_like.learner, axlearn_like.input, experiments.registry
from axlearn_like.config.declared import LIBRARIES, _OURS
from axlearn_like.config.names import import_name, qualified_name
for name in experiments.registry.entries():
    experiments.registry.find(name)
everything = {f"{m}:{n}": import_name(f"{m}:{n}") for m, names in LIBRARIES.items() for n in names.split()}
ours = {name: import_name(name) for name in _OURS}
assert len(ours) >= 5 and len(everything) > 150
everything |= ours
tree = {"w": jnp.ones((2, 2))}

def use(result, value):
    if isinstance(result, optax.GradientTransformation):
        state = result.init(tree)
        result.update(tree, state, tree, value=1.0, grad=tree, value_fn=value)
    elif callable(result):
        result(1), result(value)

def attempt(function, arguments, value, further):
    try:
        result = function(**arguments)
        if further:
            use(result, value)
    except Exception:
        pass

part = int(sys.argv[1])
if part > 1:  # every seventh function of the libraries, and ours
    everything = {name: made for n, (name, made) in enumerate(everything.items()) if n % 7 == 0 or name in ours}

def walk():
    global current
    references = list(everything.items())
    calls = 0
    for number, (name, function) in enumerate(everything.items()):
        try:
            parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in (1, 3)]
        except ValueError:
            parameters = []
        needed = {p.name: 0.1 for p in parameters if p.default is p.empty}
        for index, (reference, value) in enumerate(references):
            if index % part != number % part and reference not in ours:
                continue
            current = f"{name} with {reference}"
            if not parameters:
                try:
                    function(value)
                except Exception:
                    pass
            for p in parameters:
                attempt(function, needed | {p.name: value}, value, (index + number) % 16 == 0)
                calls += 1
    return calls

for function in everything.values():  # what libraries import when they are first used
    for value in (1, 0.5, jnp.ones((2, 2)), b"{}", lambda *a: 1):
        try:
            use(function(value), value)
        except Exception:
            pass
attempt(optax.lion, {"learning_rate": 0.1}, 1, True)
import jax
from jax.experimental.compilation_cache import compilation_cache
jax.config.update("jax_enable_compilation_cache", False)  # it reads and writes files
compilation_cache.reset_cache()  # jax looks once whether programs are kept
watching = True
calls = walk()
watching = False
print(json.dumps({"calls": calls, "seen": seen}))
"""


def watched(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script in a process of its own and return what it prints last."""
    done = subprocess.run([sys.executable, "-c", WATCH + script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("part", [400, pytest.param(1, marks=[pytest.mark.full, pytest.mark.timeout(1500)])])
def test_all_that_is_declared_is_harmless_with_all_that_is_declared(part: int):
    """Make every `part`th call with a reference as an argument, and all those with our own functions."""
    found = watched(WALK, str(part))
    assert found["calls"] > (1_000 if part == 1 else 200)
    assert found["seen"] == {}


# As above, of the modules of this project: what a text names is imported before it is looked at.
IMPORTS = """
import importlib, os, pkgutil
import numpy, jax, flax.nnx, orbax.checkpoint, ray, grain.python, rich, click  # noqa
names = []
for room in sys.argv[1].split(","):
    package = importlib.import_module(room)
    names += [m.name for m in pkgutil.walk_packages(package.__path__, f"{room}.") if not m.name.endswith("__main__")]
STARTS = ("subprocess.", "socket.connect", "socket.bind", "pickle.", "shutil.", *(f"os.{name}" for name in (
    "system", "exec", "posix_spawn", "fork", "kill", "remove", "rename", "mkdir", "rmdir", "chmod", "link", "symlink")))
found = {}
def starts(event, args):
    # Python writes compiled modules itself. A descriptor was opened by its path before.
    by_path = event == "open" and not isinstance(args[0], int)
    writes = by_path and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if watching and (event.startswith(STARTS) or writes) and "__pycache__" not in str(args):
        found.setdefault(f"{event} {args}"[:200], current)
sys.addaudithook(starts)
watching = True
for current in names:
    try:
        importlib.import_module(current)
    except ImportError:
        pass
watching = False
print(json.dumps({"modules": len(names), "found": found}))
"""


@pytest.mark.slow
def test_to_import_a_module_of_ours_does_nothing():
    found = watched(IMPORTS, ",".join(OWN))
    assert found["modules"] > 400
    assert found["found"] == {}


@pytest.mark.parametrize("room", OWN)
def test_no_other_function_or_class_of_ours_is_reached(room: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trusted_code, "nearest_declared", lambda name: "")  # it takes milliseconds, thousands of times
    tried = 0
    package = importlib.import_module(room)
    importlib.import_module("experiments.registry")
    for module in pkgutil.walk_packages(package.__path__, f"{room}."):
        for name, found in vars(sys.modules.get(module.name, package)).items():
            defined_here = getattr(found, "__module__", None) == module.name
            if defined_here and callable(found) and not is_ours_declared(found):
                with pytest.raises(ImportNameError):
                    import_name(f"{module.name}:{name}")
                tried += 1
    assert tried >= 8


CALLS = [
    (
        "optax.tree_utils._state_utils:_tree_leaves_with_named_tuple_path()",
        {"is_leaf": "axlearn_like.config.trusted_code:import_place", "tree": "'{file}'"},
    ),
    ("optax:masked()", {"inner": "axlearn_like.config.trusted_code:import_place", "mask": "'{file}'"}),
    (
        "axlearn_like.learner.optimizers.elementwise:Optax",
        {"direction": "axlearn_like.config.trusted_code:import_place"},
    ),
    ("optax:tree_map_params()", {"initable": "None", "f": "None", "state": "None"}),
    ("jax.numpy:load()", {"file": "'{file}'"}),
    ("axlearn_like.__main__:main()", {}),
    ("axlearn_like.config.trusted_code:import_place()", {"place": "'{file}'"}),
    ("class subprocess:Popen", {}),
    ("class axlearn_like.run.directory:RunDirectory", {}),
    ("axlearn_like.input.record_formats:json.loads()", {"s": "'1'"}),
]


@pytest.mark.parametrize("name, fields", CALLS)
def test_a_text_alone_runs_nothing(tmp_path: Path, name: str, fields: dict[str, str]):
    """Try what a hostile text did: it named a private function of optax, and one of ours for that to call."""
    file, ran = tmp_path / "evil.py", tmp_path / "ran"
    file.write_text(f"open({str(ran)!r}, 'w').write('x')\n")
    values = {key: value.format(file=file) for key, value in fields.items()}
    inside = [f"direction: {name}", *(f"direction.{key}: {value}" for key, value in values.items())]
    for lines in (
        ["axlearn_like.learner:Optax", *inside],
        [name, *(f"{key}: {value}" for key, value in values.items())],
    ):
        with pytest.raises(ConfigError, match="a config may not name|has no|expected module:name"):
            from_text("\n".join(lines)).build()
    assert not ran.exists()


def test_declared_names_are_read_and_written():
    for module, names in LIBRARIES.items():
        for name in names.split():
            found = import_name(f"{module}:{name}")
            assert callable(found), name
    text = "axlearn_like.learner:Optax\ndirection: optax.contrib:scale_by_ademamix()\ndirection.alpha: 5.0\n"
    cfg = from_text(text)
    assert isinstance(cfg, Optax.Config)
    assert "direction: optax.contrib:scale_by_ademamix()" in to_text(cfg)
    with pytest.raises(ConfigError, match="did you mean 'optax.contrib:scale_by_ademamix'"):
        from_text(text.replace("scale_by_ademamix", "scale_by_ademamixx"))
    with pytest.raises(ConfigError, match="did you mean 'optax:adamw'"):
        from_text(text.replace("optax.contrib:scale_by_ademamix", "optax._src.alias:adamw"))


def undeclared_value(x: float) -> float:
    return x


def test_what_could_not_be_read_again_is_not_written():
    cfg = Optax.Config(direction=config_for(qualified_name, obj=None))
    with pytest.raises(ConfigError, match=r"direction: a config may not name 'axlearn_like.*@config_function"):
        to_text(cfg)
    assert "test_declared:undeclared_value()" in to_text(Optax.Config(direction=config_for(undeclared_value)))
