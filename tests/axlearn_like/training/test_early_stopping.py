from axlearn_like.training.early_stopping import EarlyStopping


def test_early_stopping_looks_at_the_mean_of_the_last_rows():
    reached = EarlyStopping.Config(metric="accuracy", at_least=0.5, rows=2).build()
    rows = [{"accuracy": value} for value in (0.9, 0.2, 0.7, 0.4)]
    assert not reached(rows[:1])  # too few rows
    assert reached(rows[:2])
    assert not reached(rows[:3])
    assert reached(rows)


def test_rows_from_a_step_on_do_not_count():
    reached = EarlyStopping.Config(metric="accuracy", at_least=0.5, rows=2).build()
    rows = [{"step": step, "accuracy": value} for step, value in enumerate((0.1, 0.6, 0.6, 0.1))]
    assert reached(rows, before=3)
    assert not reached(rows, before=4)
