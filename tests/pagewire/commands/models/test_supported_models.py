"""The page of models is what the last sweep has found, and the sweep holds what is promised."""

from pagewire.commands.models import supported_models
from pagewire.commands.models.supported_models import Outcome
from tests.families.record import PAGE


def test_the_page_equals_the_results_of_the_sweep() -> None:
    assert PAGE.read_text() == supported_models.page(supported_models.read()), "run `make models`"


def test_no_served_architecture_gives_wrong_tokens() -> None:
    sweep = supported_models.read()
    assert sweep.count(Outcome.WRONG, Outcome.CRASHED) == 0
    assert sweep.count(Outcome.NATIVE, Outcome.EXACT) >= 70
    refused = {family.model_type for family in sweep.families if family.outcome == Outcome.REFUSED}
    assert {"falcon_h1", "inkling_text", "diffllama"} <= refused


def test_no_vocabulary_of_llama_cpp_gives_other_ids() -> None:
    outcomes = [vocabulary.outcome for vocabulary in supported_models.read().vocabularies]
    assert set(outcomes) <= {Outcome.EXACT, Outcome.REFUSED}
    assert outcomes.count(Outcome.EXACT) >= 14
