"""Tables of tensor names, on layouts of several families: numbers count through the tensor, so that places show."""

import numpy as np
import pytest

from models.huggingface.rows import ConversionError, Row, Section, tensors_of


def counted(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


def read(params, sections, tensors):
    """Parameters, by the table, from tensors; and the tensors again, written through the same views."""
    expected = tensors_of(params, sections, "Test")
    assert {name: tensor.shape for name, tensor in expected.items()} == {n: t.shape for n, t in tensors.items()}
    flat = {}
    for group, parts in params.items():
        for name, array in parts.items():
            flat[f"{group}.{name}"] = np.full(array.shape, -1)
    back = {name: np.full(tensor.shape, -1) for name, tensor in tensors.items()}
    for name, tensor in expected.items():
        for piece in tensor.pieces:
            view = piece.view(tensors[name])
            assert np.shares_memory(view, tensors[name])
            flat[piece.parameter][piece.index] = view
            piece.view(back[name])[...] = flat[piece.parameter][piece.index]
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
    assert all((array >= 0).all() for array in flat.values())
    return flat


def test_queries_keys_and_values_in_one_matrix_that_is_not_transposed():
    """GPT-2: [in, out], the outputs of queries, keys and values side by side."""
    params = {"a": {"q_dkqh": np.empty((4, 3, 1, 2)), "k_dkh": np.empty((4, 3, 2)), "v_dkh": np.empty((4, 3, 2))}}
    rows = {"q_dkqh": Row("c", "d,[kqh]"), "k_dkh": Row("c", "d,[kh]", 1), "v_dkh": Row("c", "d,[kh]", 2)}
    tensor = counted(4, 18)
    flat = read(params, [Section("a.", rows)], {"c": tensor})
    np.testing.assert_array_equal(flat["a.k_dkh"], tensor[:, 6:12].reshape(4, 3, 2))


def test_parts_of_unequal_width_within_each_head():
    """DeepSeek: for each head the part of the key, then the value."""
    params = {"a": {"k_up_rkh": np.empty((5, 2, 3)), "v_up_rkh": np.empty((5, 2, 4))}}
    rows = {"k_up_rkh": Row("kv", "k[h],r"), "v_up_rkh": Row("kv", "k[h],r", 1)}
    tensor = counted(14, 5)
    flat = read(params, [Section("a.", rows)], {"kv": tensor})
    np.testing.assert_array_equal(flat["a.v_up_rkh"][:, 1], tensor[10:14].T)


def test_alternating_columns_of_stacked_experts():
    """gpt-oss: all experts in one tensor, gate and up column by column."""
    params = {"layers": {"gate_edf": np.empty((2, 3, 4, 5)), "up_edf": np.empty((2, 3, 4, 5))}}
    rows = {"gate_edf": Row("layers.{}.gate_up", "e,d,f[]"), "up_edf": Row("layers.{}.gate_up", "e,d,f[]", 1)}
    tensors = {f"layers.{index}.gate_up": counted(3, 4, 10) + 1000 * index for index in range(2)}
    flat = read(params, [Section("layers.", rows, (0, 1))], tensors)
    np.testing.assert_array_equal(flat["layers.up_edf"][1], tensors["layers.1.gate_up"][..., 1::2])


def test_layers_of_two_kinds_have_the_numbers_that_they_have_there():
    """A leading run of other blocks, and two stacks that take turns."""
    params = {"lead": {"norm": np.empty((1, 4))}, "even": {"norm": np.empty((2, 4))}, "odd": {"norm": np.empty((2, 4))}}
    row = {"norm": Row("h.{}.norm", "d")}
    sections = [Section("lead.", row, (0,)), Section("even.", row, (1, 3)), Section("odd.", row, (2, 4))]
    tensors = {f"h.{index}.norm": counted(4) + 10 * index for index in range(5)}
    flat = read(params, sections, tensors)
    assert flat["even.norm"][:, 0].tolist() == [10, 30] and flat["odd.norm"][:, 0].tolist() == [20, 40]


def test_a_parameter_without_a_row_is_named():
    params = {"a": {"up_df": np.empty((2, 3)), "upp_df": np.empty((2, 3))}}
    with pytest.raises(ConversionError, match=r"a\.upp_df has no counterpart in Test; did you mean 'a\.up_df'"):
        tensors_of(params, [Section("a.", {"up_df": Row("up", "f,d")})], "Test")


def test_a_table_with_one_tensor_for_two_parameters_is_refused():
    params = {"a": {"up_df": np.empty((2, 3)), "gate_df": np.empty((2, 3))}}
    rows = {"up_df": Row("up", "f,d"), "gate_df": Row("up", "f,d")}
    with pytest.raises(ConversionError, match=r"up: a\.gate_df and a\.up_df have the same tensor"):
        tensors_of(params, [Section("a.", rows)], "Test")
