"""The program of the process that renders chat templates: bounded in time, memory and length. See `template_process`.

It is run as a file, without this project, so that it starts fast; its arguments are folders with jinja2 and markupsafe,
then the bounds. It reads requests and writes answers, each JSON behind eight bytes with its length, until its input
ends.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any


def main(folders: list[str], seconds: float, memory: int, length: int) -> None:
    """Answer requests.

    Args:
        folders: places of the packages.
        seconds: CPU time for a request; beyond it the process ends by SIGPROF.
        memory: bytes of address space.
        length: characters of a rendered text.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # parent's profiler may ignore it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of the terminal; only the end of the input counts
    sys.path[:0] = folders
    environment()
    _limit(resource.RLIMIT_AS, memory)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    read, write = sys.stdin.buffer, sys.stdout.buffer
    while len(header := read.read(8)) == 8:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(_answer(read.read(int.from_bytes(header, "little")), length)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        write.write(len(answer).to_bytes(8, "little") + answer)
        write.flush()


def _limit(kind: int, wanted: int) -> None:
    most = resource.getrlimit(kind)[1]
    bound = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(kind, (bound, bound))


def _answer(request: bytes, length: int) -> dict[str, Any]:
    """Return the text of [source, variables], None for the check of a source alone; or what was wrong."""
    from jinja2 import TemplateError

    try:
        source, variables = json.loads(request)
        try:
            template = _template(source)
        except TemplateError as error:
            return {"mistake": str(error), "line": getattr(error, "lineno", None)}
        if variables is None:
            return {"text": None}
        text = template.render(variables)
        if len(text) > length:
            return {"exceeds": f"more than {length:,} characters of text"}
        return {"text": text}
    except TemplateError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"exceeds": "too much memory"}
    except Exception as error:  # a template can raise anything
        return {"failed": f"{error!r:.200}"}


@functools.lru_cache(maxsize=8)
def _template(source: str) -> Any:
    return environment().from_string(source)


@functools.cache
def environment() -> Any:
    """Return the sandbox with the options and functions that transformers gives templates."""
    import jinja2.ext
    from jinja2 import TemplateError
    from jinja2.nodes import Node, Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %}`, which marks what an assistant has said; its text is what it holds."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        """A namespace whose attributes cannot have the names of Python's own."""

        def __init__(*args: Any, **fields: Any) -> None:
            Namespace.__init__(*args, **fields)
            for name in dict(*args[1:], **fields):
                _check_name(name)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: str) -> None:
        if str(name).startswith("_"):
            raise TemplateError(f"a namespace has no attribute {name!r}")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes what HTML would misread.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": PlainNamespace,
    }
    return made


if __name__ == "__main__":
    main(sys.argv[1:-3], float(sys.argv[-3]), int(sys.argv[-2]), int(sys.argv[-1]))
