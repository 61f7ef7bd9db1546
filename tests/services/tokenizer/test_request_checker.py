import pytest

from pagewire.services.tokenizer.request_checker import check_request
from pagewire.services.tokenizer.served_model import Model
from pagewire.shared import subjects
from pagewire.shared.bus import Message
from pagewire.shared.errors import ModelNotFound
from pagewire.shared.settings.config import Settings
from tests.support.checkpoints import checkpoint


def test_a_request_for_an_adapter_that_was_removed_gets_no_text_of_the_base() -> None:
    model = Model.load(Settings(model=str(checkpoint("llama")), served_model_name="base"))

    def check(name: str) -> str:
        message = Message(f"{subjects.GENERATE}.{name}", b'{"prompt": "x"}', reply="inbox")
        return check_request(message, "id", 0.0, model, 20).request_id

    assert check("base") == "id"
    with pytest.raises(ModelNotFound):
        check("removed")
