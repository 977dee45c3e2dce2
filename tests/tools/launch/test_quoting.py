"""Quoting: any text comes back equal from a real shell, from the kubelet's expansion and from readers of YAML 1.1."""

import io
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tools.launch.kubernetes.jobset import jobset
from tools.launch.launch import Launch, TpuApi
from tools.launch.local.manifest import Container
from tools.launch.local.pod import Place, Pod
from tools.launch.plan import LaunchPlan, Role
from tools.launch.queued.request import queued_resource
from tools.launch.quoting import as_yaml, expand, literal, shell
from tools.launch.script import CODE
from tools.launch.submission import render

NASTY = (
    *(
        "a b",
        "$(touch hit)",
        "`touch hit`",
        "${HOME}",
        "$HOME",
        "$$",
        "$$(HOME)",
        "$(HOME)",
        "a'b\"c",
        "\\",
        "~",
        "~root/x",
    ),
    *(
        "-n",
        "--",
        "-e",
        "*",
        "?[a-z]",
        "{a,b}",
        "!x",
        "#x",
        "a;b",
        "a|b&c",
        "<x>y",
        "\n",
        "a\nb\n",
        " a\n b",
        "\t",
        "\r\n",
    ),
    *(
        "é",
        "日本",
        "\u202e",
        "\u2028",
        "\x85",
        "\ufeff",
        "\x1b[31m",
        "\x7f",
        "a=b",
        "x: y",
        "- a",
        "{{",
        "%s",
        "@x",
        "",
        " ",
    ),
)
YAML_WORDS = (
    *("y", "n", "Y", "N", "yes", "No", "on", "OFF", "true", "False", "null", "Null", "~", "", "=", "<<", "1e3", "1e-3"),
    *("0o17", "017", "0x1F", "0b11", "1_000", "1:30", "1:30.5", "2026-11-28", "2026-11-28 09:27:43", ".inf", "-.INF"),
    *(
        ".nan",
        ".5",
        "+1",
        "-1",
        "12e3",
        "1.",
        "0",
        "!!int 3",
        "&a",
        "*a",
        "%YAML 1.1",
        "---",
        "...",
        "|",
        ">",
        "?",
        ":",
    ),
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30) | st.sampled_from(NASTY)
FILE = TEXT.map(lambda text: text.replace("/", "_").replace(":", "_")[:60]).filter(
    lambda text: text not in ("", ".", "..")
)
PRINT_WORDS = """printf '%s\\0' "$@" """


def read_words(output: bytes) -> list[str]:
    return output.decode().split("\0")[:-1]


def run(command: list[str], **more: Any) -> bytes:
    done = subprocess.run(command, capture_output=True, timeout=60, **more)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


class StrictLoader(yaml.SafeLoader):
    """Reader with what YAML 1.1 and Go's readers take for another thing than a text, and PyYAML does not."""


StrictLoader.yaml_implicit_resolvers = {  # a copy: PyYAML's own are those of the class
    key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("[yYnN]$"), list("yYnN"))
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile("[-+]?0o[0-7_]+$"), list("-+0"))
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


@given(st.lists(TEXT, max_size=8))
@example(list(NASTY))
@settings(max_examples=60, deadline=None)
def test_words_come_back_equal_from_a_shell(words: list[str]):
    found = run(["/bin/bash", "-c", f"set -- {shell(*words)}; {PRINT_WORDS if words else ':'}"])
    assert read_words(found) == words


@given(TEXT, st.dictionaries(st.sampled_from(["HOME", "x", ""]), TEXT))
@example("$$(HOME)$$$(HOME)$", {"HOME": "/root"})
def test_the_kubelet_gives_a_text_to_the_container_as_it_was(text: str, variables: dict[str, str]):
    assert expand(literal(text), variables) == text


def test_the_kubelet_reads_what_is_meant_for_it():
    assert expand("$(NAME)-$$(NAME)-$(OTHER)-$x-$", {"NAME": "job"}) == "job-$(NAME)-$(OTHER)-$x-$"


@given(st.lists(TEXT | st.sampled_from(YAML_WORDS)), st.dictionaries(TEXT | st.sampled_from(YAML_WORDS), TEXT))
@example([*NASTY, *YAML_WORDS, *("\n" + one for one in YAML_WORDS)], {one: one for one in (*NASTY, *YAML_WORDS)})
@settings(max_examples=100, deadline=None)
def test_texts_come_back_as_texts_from_readers_of_yaml(texts: list[str], pairs: dict[str, str]):
    document = {"texts": texts, "pairs": pairs}
    written = as_yaml(document, document)
    for loader in (yaml.SafeLoader, StrictLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        assert list(yaml.load_all(written, loader)) == [document, document]


def plan_of(cfg: Launch.Config, words: tuple[str, ...]) -> LaunchPlan:
    role = Role("command", 1, cfg.terms("command"), cfg.slices_of("trainer"), memory_gib=1)
    return LaunchPlan("name", "eval", None, (), None, (role,), (), 0.0, words)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a `python` and a `docker` that print their arguments and variables."""
    folder = tmp_path_factory.mktemp("tools")
    says = f"""#!{sys.executable}
import json, os, sys
print("found", json.dumps([sys.argv[1:], dict(os.environ)]))
"""
    for name, text in {
        "python": says,
        "docker": f'#!/bin/bash\n[ "$1" = run ] || exit 0\nexec {sys.executable} {folder}/python "$@"\n',
        "curl": '#!/bin/bash\ncase "${@: -1}" in */agent-*) echo 0 ;; */worker-n*) echo a:b:10.0.0.7 ;; esac',
        **dict.fromkeys(("mountpoint", "gcsfuse", "gcloud", "sleep"), "#!/bin/bash\nexit 0\n"),
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755 | stat.S_IXUSR)
    return folder


def found_in(output: bytes) -> tuple[list[str], dict[str, str]]:
    (line,) = [line for line in output.decode().splitlines() if line.startswith("found ")]
    words, variables = json.loads(line.removeprefix("found "))
    return words, variables


@pytest.mark.slow
@given(TEXT, TEXT, TEXT)
@example("$(touch hit)", "$(POD_IP)$$", "'`touch hit`'\n\"")
@settings(max_examples=25, deadline=None)
def test_words_variables_and_setup_pass_through_a_manifest_and_its_container(
    stand_ins: Path, word: str, value: str, more: str
):
    with tempfile.TemporaryDirectory() as folder:
        cfg = Launch.Config(
            command=("eval",), storage="gs://bucket/runs", bundle=False, image="mine", env={"VALUE": value}
        )
        cfg.setup = shell("export", f"MORE={more}")
        written = render(cfg, plan_of(cfg, (word, more)), "0" * 16)["command.yaml"]
        (manifest,) = yaml.load_all(written, StrictLoader)
        container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
        variables = {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
        for one in container["env"]:
            variables[one["name"]] = expand(one["value"], variables) if "value" in one else "0"
        command = [expand(one, variables) for one in (*container["command"], *container["args"])]
        command[command.index("--run-dir") + 1] = f"{folder}/run"  # for there is no /axl here
        words, seen = found_in(run(command, env=variables, cwd=folder))
        assert words[-2:] == [word, more] and (seen["VALUE"], seen["MORE"]) == (value, more)
        assert os.listdir(folder) == ["run"], "nothing ran"


@pytest.mark.slow
@given(TEXT, TEXT)
@example("$(touch hit)", "a\n'$x`touch hit`")
@settings(max_examples=15, deadline=None)
def test_words_and_variables_pass_through_a_queued_resource_and_docker(stand_ins: Path, word: str, value: str):
    cfg = Launch.Config(
        command=("eval",),
        on="queued-resource",
        devices="v6e:1x1",
        storage="gs://bucket/runs",
        env={"VALUE": value},
        setup=value,
        tpu_api=TpuApi.Config(project="project-1", zone="us-east5-a"),
    )
    request = json.loads(json.dumps(queued_resource(cfg, plan_of(cfg, (word,)), "0" * 16)))
    script = request["tpu"]["nodeSpec"][0]["node"]["metadata"]["startup-script"]
    with tempfile.TemporaryDirectory() as folder:
        script = script.replace("mkdir -p /axl", "mkdir -p axl")
        variables = {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
        words, _ = found_in(run(["/bin/bash", "-c", script], env=variables, cwd=folder))
        assert words[-1] == word and f"VALUE={value}" in words
        assert words[words.index("axl", 5) :][1:4] == [CODE, "/axl/runs/bundles/axl-0000000000000000.tar.gz", value]
        assert os.listdir(folder) == ["axl"], "nothing ran"


PACKAGES = {"tools/__init__.py": b"", "tools/launch/__init__.py": b""}


def pack(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


@pytest.mark.slow
@given(FILE, TEXT)
@example("a b$(touch hit)`touch hit`", "$(touch hit)")
@example("-n'\"\n~*", "$$")
@settings(max_examples=12, deadline=None)
def test_a_process_of_this_machine_starts_in_any_folder(name: str, word: str):
    cfg = Launch.Config(command=("eval",), on="local", storage="dir:x")
    plan = plan_of(cfg, (word,))
    manifest = jobset(cfg, plan, plan.roles[0], 0, "0" * 16)
    given = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    says = b"import json, os, sys; json.dump([sys.argv[1:], os.getcwd()], open(sys.argv[5] + '/said', 'w'))"
    with tempfile.TemporaryDirectory() as folder:
        storage, home = Path(folder, name), os.getcwd()
        (storage / "bundles").mkdir(parents=True)
        pack(storage / "bundles" / "axl-0000000000000000.tar.gz", PACKAGES | {"tools/launch/process.py": says})
        container = Container("x", (*given["command"], *given["args"]), (), {"/axl": str(storage)}, 0)
        place = Place("x", "x", "127.0.0.1", {}, storage / "root", (CODE,), storage / "log", f"test/{os.getpid()}", {})
        pod = Pod(container, place, 5.0, str, lambda owner, key: "")
        while not pod.ended:
            pod.poll()
        assert pod.status == 0, (storage / "log").read_text()
        words, where = json.loads((storage / "name" / "said").read_text())
        assert words[-1] == word and where == f"{storage}/root{CODE}"
        assert os.listdir(folder) == [name] and os.getcwd() == home, "nothing ran"
