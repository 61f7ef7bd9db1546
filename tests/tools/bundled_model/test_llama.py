import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.bundled_model.llama import Llama, Shape

SMALL = Shape(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)


def test_logits_equal_transformers() -> None:
    torch.manual_seed(0)
    mine = Llama(SMALL).eval()
    theirs = LlamaForCausalLM(
        LlamaConfig(
            **{name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__ if name != "rope_theta"},
            rope_parameters={"rope_type": "default", "rope_theta": SMALL.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    missing = theirs.load_state_dict(mine.state_dict(), strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys == ["lm_head.weight"]  # tied
    theirs.tie_weights()
    ids = torch.randint(0, SMALL.vocab_size, (3, 64))
    with torch.no_grad():
        torch.testing.assert_close(mine(ids), theirs(ids).logits, rtol=0, atol=1e-5)


def test_dropout_is_for_training_alone() -> None:
    torch.manual_seed(0)
    model = Llama(SMALL, dropout=0.5)
    ids = torch.randint(0, SMALL.vocab_size, (1, 8))
    assert not torch.equal(model.train()(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


def test_no_position_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = Llama(SMALL).eval()
    ids = torch.randint(1, SMALL.vocab_size, (1, 16))
    changed = ids.clone()
    changed[0, 10] = 0
    before, after = model(ids), model(changed)
    assert torch.allclose(before[0, :10], after[0, :10], atol=1e-6)
    assert not torch.allclose(before[0, 10:], after[0, 10:], atol=1e-6)
