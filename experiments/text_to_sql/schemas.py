"""Small random schemas: the same things under names that differ from schema to schema, as in the wild."""

import dataclasses

import numpy as np

__all__ = ["Column", "Schema", "Table", "random_schema"]

# Words of questions, and names that a column or table may have.
TABLES = {
    "patients": ("patients", "cases"),
    "students": ("students", "pupils"),
    "cars": ("cars", "vehicles"),
    "books": ("books", "volumes"),
    "houses": ("houses", "homes"),
    "workers": ("workers", "staff"),
}
NUMBERS = {
    "age": ("age", "years"),
    "weight": ("weight", "kg"),
    "price": ("price", "cost"),
    "score": ("score", "points"),
    "size": ("size", "area"),
}
TEXTS = {
    "city": ("city", "town"),
    "color": ("color", "paint"),
    "group": ("team", "unit"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column: what a question calls it, its name, and its type."""

    thing: str
    name: str
    kind: str


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table: what a question calls its rows, its name, and its columns beside `id`."""

    thing: str
    name: str
    columns: tuple[Column, ...]

    def of_kind(self, kind: str) -> list[Column]:
        """Return the columns of a type."""
        return [column for column in self.columns if column.kind == kind]


@dataclasses.dataclass(frozen=True, slots=True)
class Schema:
    """Tables without a row: nothing here comes from a database."""

    tables: tuple[Table, ...]

    @property
    def outline(self) -> str:
        """The names alone, a table a line: what the policy is shown."""
        return "\n".join(f"{table.name}({', '.join(c.name for c in table.columns)})" for table in self.tables)

    @property
    def statements(self) -> str:
        """CREATE TABLE statements."""
        made = []
        for table in self.tables:
            columns = ", ".join(f"{column.name} {column.kind}" for column in table.columns)
            made.append(f"CREATE TABLE {table.name} (id INTEGER PRIMARY KEY, {columns});")
        return "\n".join(made)


def random_schema(rng: np.random.Generator, tables: int) -> Schema:
    """Return a schema of so many tables, each with two numbers and a text."""
    made = []
    for thing in rng.choice(list(TABLES), size=tables, replace=False):
        things = [(str(one), "INTEGER") for one in rng.choice(list(NUMBERS), size=2, replace=False)]
        things += [(str(one), "TEXT") for one in rng.choice(list(TEXTS), size=1)]
        names = {**NUMBERS, **TEXTS}
        columns = tuple(Column(one, _one_of(rng, names[one]), kind) for one, kind in things)
        made.append(Table(str(thing), _one_of(rng, TABLES[str(thing)]), columns))
    return Schema(tuple(made))


def _one_of(rng: np.random.Generator, names: tuple[str, ...]) -> str:
    return names[rng.integers(len(names))]
