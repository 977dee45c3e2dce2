"""Chat templates that would take all time or memory, for `tests.measured`; none is longer than a few hundred bytes."""

from functools import partial
from pathlib import Path

from axlearn_like.tokenizers.jinja_template import JinjaTemplate
from tests.measured import Cases

_LOOP = "{% for a in r %}{% for b in r %}{% for c in r %}BODY{% endfor %}{% endfor %}{% endfor %}"
_THOUSAND = "{% set r = range(1000) %}"
SOURCES = {
    "one long range": "{% for i in range(10**9) %}{% endfor %}",
    "loops in loops": _THOUSAND + _LOOP.replace("BODY", ""),
    "output of loops": _THOUSAND + _LOOP.replace("BODY", "xxxxxxxx"),
    "a loop whose test counts": _THOUSAND + "{% for a in r if (r | map('string') | list | length) > 9 * a %}"
    "{% for b in r if (r | map('string') | list | length) > b %}{% endfor %}{% endfor %}",
    "a string times a number": "{{ 'x' * 10**9 }}",
    "a variable times a number": "{{ (messages[0].content * 10**9) | length }}",
    "a list times a number": "{{ ([0] * 10**9) | length }}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "a power of a variable": "{% set x = messages | length + 9 %}{{ x ** (x ** 9) }}",
    "digits of a power": "{{ (10 ** 40000) * (10 ** 40000) }}",
    "doubled text": "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubled blocks": "{% set x0 %}xx{% endset %}"
    + "".join(f"{{% set x{i + 1} %}}{{{{ x{i} }}}}{{{{ x{i} }}}}{{% endset %}}" for i in range(40)),
    "doubled lists": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "doubled lists compared": "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "doubled lists as JSON": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}{{ ns.x | tojson }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a loop that calls itself": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide format of a star": "{{ '%*d' % (1000000000, 1) }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "str.format": "{{ '{:1000000000d}'.format(1) }}",
    "center": "{{ 'x' | center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "indent": "{{ 'x' | indent(10**9, true) }}",
    "indent of JSON": "{{ messages | tojson(indent=10**9) }}",
    "replace": "{% set x = 'x' * 10000 %}{{ x | replace('', x) | replace('', x) }}",
    "join": "{% set x = 'x' * 100000 %}{{ range(100000) | join(x) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "lorem ipsum": "{{ lipsum(n=10**9) }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big') }}",
    "encoded text": "{{ ('x' * 50000000).encode('utf-32') }}",
    "a sorted range": "{% for i in range(1000) %}{{ range(100000) | sort | length }}{% endfor %}",
    "words to links": "{{ ('http://' * 3000000) | urlize }}",
    "tags": "{{ ('<' * 30000000) | striptags }}",
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a long sum": "{{ " + "1 + " * 20000 + "1 }}",
    "deep attributes": "{{ messages" + ".x" * 20000 + " }}",
    "deep nots": "{{ " + "not " * 20000 + "1 }}",
    "a surrogate": "{{ '\\ud800' * 200000000 }}",
    "includes itself": "{% include 'x' %}",
}


def _render(source: str, folder: Path) -> None:
    JinjaTemplate(source, {}).render([{"role": "user", "content": "x"}])


# Ended by the bound on CPU time, as others that are not here.
AS_LONG = (
    *("a sorted range", "doubled lists", "slice", "a macro that calls itself twice", "lorem ipsum"),
    *("a power of a variable", "output of loops", "doubled lists compared", "a loop whose test counts"),
)

CASES: Cases = {name: partial(_render, source) for name, source in SOURCES.items()}
