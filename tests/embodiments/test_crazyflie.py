"""The Crazyflie's numbers, against what the papers say of it."""

from __future__ import annotations

import pytest

from embodied.embodiments.crazyflie import LIBRARY, MOTORS, PAPER, VEHICLES, Vehicle


@pytest.mark.parametrize("vehicle", VEHICLES.values(), ids=VEHICLES)
def test_hovering_carries_the_weight(vehicle: Vehicle) -> None:
    u = (vehicle.hover + 1) / 2
    c0, c1, c2 = vehicle.thrust
    assert 4 * (c0 + c1 * u + c2 * u * u) == pytest.approx(vehicle.weight)
    assert -1 < vehicle.hover < 1
    assert len(vehicle.rotors) == len(vehicle.spins) == len(MOTORS)


def test_the_papers_vehicle() -> None:
    assert (PAPER.hover + 1) / 2 * PAPER.top_rpm == pytest.approx(14475.8, abs=0.1)
    assert PAPER.lift == pytest.approx(2.25, abs=0.005)
    assert PAPER.hover == pytest.approx(0.334, abs=1e-4)


def test_the_librarys_vehicle_is_another() -> None:
    assert LIBRARY.mass > PAPER.mass and LIBRARY.rise < LIBRARY.fall
    assert sum(LIBRARY.thrust) == pytest.approx(0.11012888)
    with pytest.raises(ValueError, match=r"0.0035 to 0.1101 N, got 0.2000 N"):
        LIBRARY.speed(0.2)
