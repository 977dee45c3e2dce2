"""The verifier of queries scores 0 for wrong answers made from right ones, 1 for right ones in other words."""

from collections.abc import Sequence

from experiments.text_to_sql.verifier import SqlVerifier
from rl.verification.verifiers.self_test import Case, self_test

TABLE = "CREATE TABLE cases (id INTEGER PRIMARY KEY, age INTEGER, ward TEXT);"


def case(answer: str, right: Sequence[str], wrong: Sequence[str]) -> Case:
    return Case({"answer": answer, "schema": TABLE}, [answer, *right], wrong)


CASES = (
    case(
        "SELECT COUNT(*) FROM cases WHERE age > 40",
        [
            "select count(id) from cases where age >= 41;",
            "```sql\nSELECT SUM(age > 40) FROM cases\n```",
            "SELECT COUNT(*) FROM (SELECT id FROM cases EXCEPT SELECT id FROM cases WHERE age <= 40)",
        ],
        [
            "SELECT COUNT(*) FROM cases WHERE age > 41",
            "SELECT COUNT(*) FROM cases WHERE age < 40",
            "SELECT COUNT(*) FROM cases",
            "SELECT age FROM cases WHERE age > 40",
            "SELECT COUNT(*) FROM cases WHERE years > 40",
            "DELETE FROM cases",
            "PRAGMA table_info(cases)",
            "null",
            "",
            "7",
        ],
    ),
    case(
        "SELECT ward, MAX(age) FROM cases GROUP BY ward",
        ["SELECT ward, MAX(age) AS oldest FROM cases GROUP BY 1 ORDER BY 2"],
        [
            "SELECT ward, MIN(age) FROM cases GROUP BY ward",
            "SELECT MAX(age) FROM cases GROUP BY ward",
            "SELECT ward, MAX(age) FROM cases",
            "SELECT ward, MAX(age) FROM cases GROUP BY ward LIMIT 2",
        ],
    ),
    case("null", ["NULL", " null "], ["SELECT COUNT(*) FROM cases", "SELECT NULL", "none", ""]),
)


def test_the_verifier_passes_its_self_test():
    result = self_test(lambda rows: SqlVerifier.Config(mixture=rows), CASES)
    assert result.tried > 20 and result.mistakes == ()
