"""Figures of a result as the console shows them."""

from tools.bench.harness.show import cell, leaves


def test_figures_of_nested_records_have_paths_whatever_their_keys_are():
    result = {"a": 1, "b": {"c": 2.5, "d": {8: 1.03, 7: 1.04}}, "rows": [1, 2]}
    assert leaves(result) == {"a": 1, "b.c": 2.5, "b.d.8": 1.03, "b.d.7": 1.04}


def test_a_figure_has_four_digits():
    assert [cell(x) for x in (1.23456, 123456.7, 1.0)] == ["1.235", "123,457", "1"]
