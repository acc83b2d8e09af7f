"""``python -m benchmarks.costs``: each of its measurements can be run by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.costs import __main__ as costs


@pytest.mark.parametrize("name", costs.MEASUREMENTS)
def test_each_measurement_shows_what_it_measures_and_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        costs.main([name, "--help"])
    assert exit_info.value.code == 0
    help_text = capsys.readouterr().out
    assert f"python -m benchmarks.costs {name}" in help_text
    assert "--json" in help_text


def test_every_module_of_the_folder_is_a_measurement_or_a_part_of_one() -> None:
    modules = {file.stem for file in Path(costs.__file__).parent.glob("*.py")}
    assert modules - {"__init__", "__main__", "ray_driver"} == set(costs.MEASUREMENTS)
