from pathlib import Path

from axlearn_like.run.jsonl import JsonlTail


def test_only_what_is_new_and_whole_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = JsonlTail(path)
    assert tail.new_rows() == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert tail.new_rows() == [{"a": 1}, {"a": 2}]
    assert tail.new_rows() == []
    with open(path, "a") as file:
        file.write(": 3}\n")
    assert tail.new_rows() == [{"a": 3}]
    assert JsonlTail(path, from_end=True).new_rows() == []


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    path, other = tmp_path / "rows.jsonl", tmp_path / "other"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = JsonlTail(path)
    tail.new_rows()
    other.write_text('{"a": 1}\n{"a": 7}\n')
    other.replace(path)
    assert tail.new_rows() == [{"a": 1}, {"a": 7}]
    path.write_text('{"a": 9}\n')  # cut
    assert tail.new_rows() == [{"a": 9}]
