import pytest

from pagewire.shared.errors import ConfigurationError
from pagewire.shared.settings import config
from pagewire.shared.settings.config import Settings, seconds


@pytest.mark.parametrize(
    ("text", "expected"), [("500ms", 0.5), ("10s", 10.0), ("1.5s", 1.5), ("2m", 120.0), ("1h", 3600.0), ("0s", 0.0)]
)
def test_a_duration_is_a_number_with_its_unit(text: str, expected: float) -> None:
    settings = config.load({"max-queue-wait": text}, environ={})
    assert settings.max_queue_wait is not None
    assert seconds(settings.max_queue_wait) == pytest.approx(expected)
    assert config.load({}, environ=config.to_environment(settings)) == settings


@pytest.mark.parametrize("text", ["10", "s", "10 s", "-1s", "10sec", "1m30s", "", 10])
def test_an_invalid_duration_is_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigurationError, match="max-queue-wait"):
        config.load({"max-queue-wait": text}, environ={})


def test_the_wait_is_unbounded_by_default() -> None:
    assert Settings().max_queue_wait is None
