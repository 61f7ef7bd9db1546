import math

import pytest
import torch
from torch import Tensor, nn

from tools.bundled_model.measure import bits_per_byte, held_out_ids, token_losses
from tools.bundled_model.texts import Book
from tools.bundled_model.vocabulary import end_of_text, train_tokenizer

TOKENIZER = train_tokenizer(["a book that is about nothing at all"] * 3, 270)


class Even(nn.Module):
    """Every token is as likely as any other."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, TOKENIZER.get_vocab_size())


class Counting(nn.Module):
    """The loss of a token tells how many tokens were before it."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.full((*ids.shape, 8), -math.inf)
        logits[..., 0] = 0.0
        logits[..., 1] = torch.arange(ids.shape[1]) / 4
        return logits


@pytest.mark.parametrize(("length", "window", "stride"), [(2, 8, 4), (8, 8, 4), (9, 8, 4), (50, 8, 4), (50, 8, 8)])
def test_every_token_but_the_first_counts_once(length: int, window: int, stride: int) -> None:
    assert len(token_losses(Even(), [0] * length, window, stride)) == length - 1


def test_tokens_have_enough_before_them() -> None:
    losses = token_losses(Counting(), [1] * 60, window=16, stride=4)
    before = -4 * torch.log(torch.expm1(losses))  # of the logit x the loss is log(1 + e**-x)
    assert before[:14].round().tolist() == list(range(14))
    assert before[15:].min() >= 16 - 4 - 1.01


def test_documents_stand_between_ends_of_text() -> None:
    ids, size = held_out_ids(TOKENIZER, ["äh", "book"])
    eos = end_of_text(TOKENIZER)
    assert (ids[0], ids[-1], ids.count(eos)) == (eos, eos, 3)
    assert size == 7


def test_an_even_model_has_the_bits_of_its_vocabulary() -> None:
    books = {"one": Book([], ["a book"]), "two": Book([], ["nothing at all", "zzz"])}
    bits = bits_per_byte(Even(), TOKENIZER, books, 512, 256)
    for name, book in books.items():
        ids, size = held_out_ids(TOKENIZER, book.held_out)
        assert bits[name] == pytest.approx((len(ids) - 1) * math.log2(270) / size, rel=1e-5)
    assert min(bits["one"], bits["two"]) < bits["all"] < max(bits["one"], bits["two"])
