"""Single flight: values are kept up to a number, and computed again beyond it."""

from __future__ import annotations

from starling.weightsync.memory.single_flight import SingleFlight


def test_values_beyond_the_most_are_computed_and_not_kept() -> None:
    values: SingleFlight[int, int] = SingleFlight(2)
    for key in (0, 1, 2, 2, 1):
        assert values.get_or_compute(key, lambda key=key: key * key) == key * key  # type: ignore[misc]
    assert values.num_computed == 4
    assert [values.get(key) for key in (0, 1, 2)] == [0, 1, None]
