from itertools import product

from pagewire.bench._chaos.requests import SHAPES, mixture


def test_a_seed_gives_the_same_requests_each_time() -> None:
    assert mixture(3, 40) == mixture(3, 40)
    assert mixture(3, 40) != mixture(4, 40)


def test_every_shape_goes_over_each_transport() -> None:
    requests = mixture(1, 40, rounds=3)
    assert [request.number for request in requests] == list(range(len(requests)))
    for transport in ("nats", "http"):
        shapes = [request.shape for request in requests if request.transport == transport]
        assert sorted(shapes) == sorted(SHAPES * 3)


def test_each_model_gets_every_shape_over_each_transport() -> None:
    requests = mixture(1, 40, rounds=1, models=("a", "b"))
    kinds = [(request.model, request.transport, request.shape) for request in requests]
    assert sorted(kinds) == sorted(product(("a", "b"), ("nats", "http"), SHAPES))


def test_answers_can_be_repeated() -> None:
    for request in mixture(1, 40):
        sampling = request.sampling
        assert sampling.get("temperature") == 0 or "seed" in sampling or "beam_width" in sampling
        assert (request.cancel_after > 0) == (request.shape == "cancelled")
