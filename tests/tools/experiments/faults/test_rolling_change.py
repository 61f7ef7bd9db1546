from pathlib import Path

import pytest

from pagewire.shared.errors import ConfigurationError
from tools.experiments._common.checkouts import HERE
from tools.experiments.faults import rolling_change
from tools.experiments.faults.rolling_change import table


def test_a_row_has_the_manner_of_the_change_and_its_requests() -> None:
    change = {"name": "back", "beside": True, "seconds": 41.2, "requests": 70, "refused": 3, "failures": ["lost: r"]}
    lines = table([change, change | {"beside": False, "failures": []}])
    assert lines[2:] == [
        "| back | all beside the old ones | 41 | 70 | 3 | 1 |",
        "| back | one by one | 41 | 70 | 3 | 0 |",
    ]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no checkout"):
        rolling_change.main([str(tmp_path)])


@pytest.mark.full
def test_a_change_to_the_same_version_and_back_loses_nothing() -> None:
    assert rolling_change.main([str(HERE), "--clients", "4"]) == 0
