"""The plain-torch MiniLM is the BERT of transformers, averaged over the tokens, and the batches of the comparison are fair."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.minilm import MiniLM, convert
from examples.text_memory import ARMS, Arm, batches, train

transformers = pytest.importorskip("transformers")


def test_a_converted_encoder_equals_the_bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=9,
    )
    bert = transformers.BertModel(config).double().eval()
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms start where an omission does not show
    words = torch.tensor([0, 3, 5, 8, 13, 21, 34])
    arguments, weights = convert(bert, words)
    ours = MiniLM(**arguments).double().eval()
    ours.load_state_dict(weights)
    tokens, mask = torch.randint(0, 7, (5, 6)), torch.arange(6) < torch.tensor([[6], [1], [4], [3], [5]])
    states = bert(input_ids=words[tokens], attention_mask=mask.long()).last_hidden_state
    expected = F.normalize(torch.stack([state[m].mean(0) for state, m in zip(states, mask)]))
    torch.testing.assert_close(ours({"input_ids": tokens, "attention_mask": mask}), expected, rtol=1e-9, atol=1e-9)


def test_a_large_batch_is_eight_small_ones_with_as_many_utterances_of_every_intent():
    labels = torch.arange(330) % 11
    ids = (labels < 9).nonzero()[:, 0]
    small, large = (batches(labels, ids, ARMS[name], seed=3) for name in ("batch_32", "batch_256"))
    seen = torch.zeros(len(labels), dtype=torch.long)
    for _ in range(5):
        batch = next(large)
        assert torch.equal(batch, torch.cat([next(small) for _ in range(8)]))
        assert labels[batch].view(-1, 4).unique(dim=1).shape[1] == 1
        seen += batch.bincount(minlength=len(labels))
    assert seen[labels >= 9].sum() == 0 and seen[ids].max() - seen[ids].min() <= 1


@pytest.mark.parametrize("arm", [*ARMS.values(), Arm(update="queue", rows=37)], ids=str)
def test_every_arm_trains(arm):
    torch.manual_seed(0)
    labels = torch.arange(300) % 6
    tokens = torch.cat([labels[:, None] * 4 + torch.arange(3), torch.randint(0, 30, (300, 3))], dim=1)
    encoder, ids = MiniLM(30, 16, 1, 2, 32, 8, 0.1, 1e-12), (labels < 5).nonzero()[:, 0]

    def features(batch):
        return {"input_ids": tokens[batch], "attention_mask": torch.ones(len(batch), 6)}

    with torch.no_grad():
        before = encoder.eval()(features(ids))
    for step, loss in train(encoder, features, labels, ids, arm, 3e-3, seed=0):
        assert loss.isfinite()
        if step == 80:
            break
    with torch.no_grad():
        after = encoder.eval()(features(ids))
    same = labels[ids][:, None] == labels[ids]

    def separation(v):
        return ((v @ v.T)[same].mean() - (v @ v.T)[~same].mean()).item()

    assert separation(after) > separation(before) + 0.2
