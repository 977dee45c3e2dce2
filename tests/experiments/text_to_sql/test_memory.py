"""Memory of queries that nobody trusts: where one would take more than there is for it, it is an error."""

import re
import subprocess
import sys

PROGRAM = """
import resource, sys
from experiments.text_to_sql.database import query, read_only
from experiments.text_to_sql.instances import instance

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

connection, before = read_only(instance("CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT);", 0)), most()
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # spares this machine where the test fails
for text in sys.argv[1:]:
    try:
        print(query(connection, text, max_rows=100, seconds=3.0).rows, flush=True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
print(most() - before)
"""
_UNIT = 1 if sys.platform == "darwin" else 1 << 10  # bytes of `ru_maxrss`
_COUNTED = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
_DOUBLED = "".join(f", c{k + 1} AS (SELECT l.x FROM c{k} AS l, c{k} AS r)" for k in range(40))
_LATE = "QueryTimeout: not done after 3 s"
QUERIES = {
    "SELECT printf('%1000000000d', 1)": r"\[\(None,\)\]",
    "SELECT hex(zeroblob(400000000))": "DataError: string or blob too big",
    "SELECT group_concat(hex(zeroblob(9999))) FROM t, t AS u, t AS v": "DataError: string or blob too big",
    f"WITH x AS (SELECT printf('%60000d', 1) AS v) SELECT {', '.join('v' * 300)} FROM x, t, t AS u": "DataError: "
    f"the result is larger than 16 MiB|{_LATE}",
    f"{_COUNTED} SELECT printf('%60000d', i) AS v FROM n ORDER BY v": _LATE,
    f"{_COUNTED} SELECT DISTINCT printf('%60000d', i) FROM n WHERE i < 0": _LATE,
    # A plan without end: the clock does not run while SQLite makes it.
    f"WITH c0 AS (SELECT 1 AS x) {_DOUBLED} SELECT x FROM c40": "OperationalError: "
    "out of memory: SQLite may take 1024 MiB in a process",
    "SELECT COUNT(*) FROM t": r"\[\(14,\)\]",
}


def test_queries_that_would_take_memory_without_end_are_errors():
    ran = subprocess.run([sys.executable, "-c", PROGRAM, *QUERIES], capture_output=True, text=True, check=True)
    *said, grown = ran.stdout.splitlines()
    for line, expected in zip(said, QUERIES.values(), strict=True):
        assert re.fullmatch(expected, line), line[:200]
    assert int(grown) * _UNIT < 1.6 * (1 << 30)
