"""Deltas travel through a real server, and come back to the bit."""

from tests.studies import deltas


def test_deltas_travel_and_come_back_to_the_bit() -> None:
    found = deltas.measure(quick=True)
    assert found["delta_bytes_ratio"] > 10  # one entry in a hundred
    assert set(found["delta_cpu_s_per_gb"]) == {"encode", "decode"}
