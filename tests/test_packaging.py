"""The wheel: it builds, holds every module, and works outside the checkout."""

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.source_files import imports
from tools.commands.bench.group import OF_THE_CHECKOUT

PACKAGES = ("axlearn_like", "experiments", "mesh", "models", "rl", "tools")
LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore", "ray")  # tried at both ends
EXTRAS = {"rl", "data", "tpu", "cuda", "hf", "notebook", "dev"}


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed, in an environment that does not point at the checkout."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """The wheel, built from a copy so that no build output lands in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(checkout / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, copy / name)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", str(copy)], copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh virtual environment with the wheel; dependencies come from ours."""
    root = tmp_path_factory.mktemp("fresh")
    run([sys.executable, "-m", "venv", "--without-pip", str(root)], root)
    python = root / "bin" / "python"
    install = ["-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    run([sys.executable, *install, str(wheel)], root)
    # Path files inside this folder (our own editable install) are not read, only its packages are.
    (site,) = root.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root / "bin"


def sources(checkout: Path) -> set[str]:
    """Paths of all modules."""
    paths = [path for package in PACKAGES for path in (checkout / package).rglob("*.py")]
    return {path.relative_to(checkout).as_posix() for path in paths}


@functools.cache
def imported(checkout: Path) -> dict[str, list[str]]:
    """Return the full names of the modules that each module imports, by path."""
    found = {}
    for name in sorted(sources(checkout)):
        module = name.removesuffix(".py").replace("/", ".")
        found[name] = [imported for _, imported, _ in imports((checkout / name).read_text(), module)]
    return found


def test_the_wheel_holds_every_module_and_no_test(wheel: Path, checkout: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert sources(checkout) <= names
    assert {name.split("/")[0] for name in names} == set(PACKAGES)


def test_no_module_of_the_wheel_imports_what_is_not_in_it(checkout: Path) -> None:
    absent = "tests", "examples"
    found = [f"{name}: {one}" for name, names in imported(checkout).items() for one in names]
    assert [line for line in found if line.split(": ")[1].split(".")[0] in absent] == []


def test_every_package_of_the_wheel_says_that_it_is_typed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_every_folder_of_modules_is_a_package(checkout: Path) -> None:
    folders = {path.parent for package in PACKAGES for path in (checkout / package).rglob("*.py")}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_the_command_line_runs_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    assert "Commands:" in run([str(installed / "axl"), "--help"], tmp_path).stdout
    assert run([str(installed / "axl"), "config", "list"], tmp_path).stdout.strip()


def test_a_wheel_says_where_the_benchmarks_of_the_project_are(installed: Path, tmp_path: Path) -> None:
    shown = " ".join(run([str(installed / "axl"), "bench", "--help"], tmp_path).stdout.split())
    assert "grpo_step CPU seconds" in shown and f"{', '.join(OF_THE_CHECKOUT)}: in a checkout" in shown
    asked = [str(installed / "axl"), "bench", "recovery"]
    refused = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (
        refused.returncode == 2
        and refused.stderr.count("\n") == 1
        and "axl bench recovery is in a checkout" in refused.stderr
    )


def test_the_installed_packages_are_the_wheels(installed: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u, sys; [print(u.find_spec(n).origin) for n in sys.argv[1:]]"
    origins = run([str(installed / "python"), "-c", code, *PACKAGES], tmp_path).stdout.split()
    assert len(origins) == len(PACKAGES)
    assert all(origin.startswith(str(installed.parent)) for origin in origins)


def canonical(name: str) -> str:
    """The name of a distribution as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_names(checkout: Path) -> dict[str, set[str]]:
    """Names of required distributions by extra; those of the core under ''."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
    return {
        extra: {canonical(match[0]) for line in lines if (match := name.match(line))} for extra, lines in groups.items()
    }


def test_the_extras_are_there(checkout: Path) -> None:
    assert set(requirement_names(checkout)) >= EXTRAS


def test_constraints_are_names_and_versions_and_pin_what_make_installs(checkout: Path) -> None:
    lines = (checkout / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    malformed = [p for p in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", p)]
    assert malformed == []
    pinned = {canonical(pin.split("==")[0]) for pin in pins}
    wanted = requirement_names(checkout)
    assert wanted[""] | wanted["rl-pure"] | wanted["rl"] | wanted["dev"] <= pinned


def test_the_oldest_libraries_of_hosted_ci_are_the_declared_lower_bounds(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "tools/constraints_for.sh"):
        shutil.copy(checkout / name, tmp_path / name)
    run(["sh", "tools/constraints_for.sh", "oldest"], tmp_path)
    text = (tmp_path / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.MULTILINE))
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["rl"], *extras["rl-pure"]]
    lower = set(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(declared), flags=re.MULTILINE))
    assert {(name, pinned[name]) for name in LIBRARIES} == {(name, bound) for name, bound in lower if name in LIBRARIES}
    assert pinned["jaxlib"] == pinned["jax"] and "libtpu" not in pinned


def test_every_imported_distribution_is_declared(checkout: Path) -> None:
    """Check what the packages import."""
    declared = set().union(*requirement_names(checkout).values())
    # Comes with jax, by its own metadata, and has its version chosen by it.
    declared |= {"jaxlib", "ml-dtypes"}
    owners = importlib.metadata.packages_distributions()
    missing = set()
    for path, modules in imported(checkout).items():
        for top in {name.split(".")[0] for name in modules} - set(PACKAGES):
            dists = {canonical(d) for d in owners.get(top, [])}
            if dists and not dists & declared:
                missing.add(f"{path} imports {top} ({dists})")
    assert sorted(missing) == []


def test_the_newest_release_of_the_changelog_is_the_version(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d|unreleased)\)$", (checkout / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == project["version"]


def test_every_file_that_names_the_version_has_it(checkout: Path) -> None:
    version = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["version"]
    assert f"dist/axlearn_like-{version}-py3-none-any.whl[rl,hf]" in (checkout / "README.md").read_text()
    assert f"\nversion: {version}\n" in (checkout / "CITATION.cff").read_text()


def test_each_install_line_of_the_readme_has_ray_and_names_extras_that_are_there(checkout: Path) -> None:
    lines = re.findall(r'-e "\.\[(.*?)\]"', (checkout / "README.md").read_text())
    assert {"rl", "rl,tpu", "rl,cuda"} <= set(lines)
    known = requirement_names(checkout)
    for line in lines:
        assert "ray" in set().union(*(known[extra] for extra in line.split(","))), line
