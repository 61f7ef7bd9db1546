import threading

import pytest

from pagewire import Client
from pagewire.shared.errors import ConfigurationError


def test_a_client_that_cannot_connect_leaves_no_thread_behind() -> None:
    before = threading.enumerate()
    with pytest.raises(ConfigurationError), Client("http://127.0.0.1:1", api_key="", tenant=""):
        pass
    assert threading.enumerate() == before
