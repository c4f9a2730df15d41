import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.worlds import on_ranks
from xbm import InputError
from xbm.distributed import Ranks
from xbm.integrations import MemoryRankingLoss
from xbm.integrations.sentence_transformers_loss import others, text_hash, token_kinds

# ------------------------------------------------------------------ which texts are the same


def padded(texts, length=None, left=False, pad=0):
    """Texts as lists of tokens, as a tokenizer returns them."""
    length = length or max(map(len, texts))
    rows = [(text, [pad] * (length - len(text))) for text in texts]
    ids = [space + text if left else text + space for text, space in rows]
    mask = [[0] * len(space) + [1] * len(text) if left else [1] * len(text) + [0] * len(space) for text, space in rows]
    return {"input_ids": torch.tensor(ids).view(len(texts), length), "attention_mask": torch.tensor(mask).view(len(texts), -1)}


def flat(texts):
    lengths = [0, *map(len, texts)]
    return {"input_ids": torch.tensor([t for text in texts for t in text]), "offsets": torch.tensor(lengths).cumsum(0)[:-1]}


def by_hand(text):
    """The definition, with Python's integers."""
    wide = (1 << 64) - 1

    def mixed(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & wide
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & wide
        return x ^ (x >> 31)

    return mixed(sum(mixed((t + k * 0x9E3779B97F4A7C15) & wide) for k, t in enumerate(text, 1)) & wide) & (wide >> 1)


TEXTS = [[5], [5, 9], [9, 5], [5, 9, 5], [], [0, 5, 9], [5, 9, 0], [30521] * 7]


def test_a_hash_depends_on_the_tokens_and_not_on_their_padding():
    expected = [by_hand(text) for text in TEXTS]
    assert len({*expected}) == len(TEXTS)
    flattened = flat(TEXTS)
    sequence = torch.tensor([[0, *map(len, TEXTS)]]).cumsum(1)[0].int()
    for features in (
        padded(TEXTS),
        padded(TEXTS, 19, pad=77),
        padded(TEXTS, 11, left=True, pad=3),
        {**padded(TEXTS), "attention_mask": padded(TEXTS)["attention_mask"].bool()},
        flattened,
        {"input_ids": flattened["input_ids"][None], "cu_seq_lens_q": sequence},
    ):
        assert text_hash(features).tolist() == expected
    assert text_hash({"input_ids": torch.tensor([[5, 9, 0]])}).tolist() == [by_hand([5, 9, 0])]


def test_hashes_of_many_texts_are_distinct_and_use_all_63_bits():
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 30, (200_000, 6), generator=draw).unique(dim=0)
    found = text_hash({"input_ids": tokens})
    assert len(found.unique()) == len(tokens) and int(found.min()) >= 0
    shares = ((found[:, None] >> torch.arange(63)) & 1).double().mean(0)
    assert (shares - 0.5).abs().amax() < 0.01


@pytest.mark.parametrize("form", [padded, flat])
def test_no_value_is_read_on_the_host(form):
    features = {name: value.to("meta") for name, value in form(TEXTS).items()}
    assert text_hash(features).shape == (len(TEXTS),)
    for length in (3, torch.tensor([3], device="meta")):
        given = {**features, "prompt_length": length}
        assert text_hash(given, torch.zeros(9, dtype=torch.int8, device="meta")).shape == (len(TEXTS),)


class Tokenizer:
    """50 words; 40 opens a text, 30 to 39 begin with a space."""

    cls_token_id, bos_token_id = 40, None

    def get_vocab(self):
        return {("▁" if k in range(30, 36) else "Ġ" if k in range(36, 40) else "") + f"word{k}": k for k in range(50)}


LENGTHS = [lambda n, m: n, lambda n, m: torch.tensor([n]), lambda n, m: torch.full((m,), n)]
FORMS = [padded, lambda texts: padded(texts, 13, left=True, pad=40), flat]


@pytest.mark.parametrize("length", LENGTHS, ids=["number", "tensor", "one each"])
@pytest.mark.parametrize("form", FORMS, ids=["right", "left", "flat"])
def test_the_tokens_of_a_prompt_do_not_count(form, length):
    texts = [[5], [5, 9], [9, 5, 9], [], [41, 40, 5]]
    expected = [by_hand(text) for text in texts]
    kinds = token_kinds(Tokenizer())
    for opening, prompt in (([40], [7]), ([40], [7, 31, 8]), ([], [8]), ([40], []), ([], [])):
        features = form([opening + prompt + text for text in texts])
        if prompt:  # as sentence-transformers states it, the opening token included
            features["prompt_length"] = length(len(opening + prompt), len(texts))
        assert text_hash(features, kinds).tolist() == expected


@pytest.mark.parametrize("form", FORMS, ids=["right", "left", "flat"])
def test_a_first_word_that_took_the_space_of_the_prompt_counts(form):
    """The prompt "query: " alone is query, :, space; before a text the space belongs to the text's first token."""
    kinds, texts = token_kinds(Tokenizer()), [[35, 5], [36, 5], [39]]
    features = form([[40, 7, 8, *text] for text in texts])
    features["prompt_length"] = 4
    assert text_hash(features, kinds).tolist() == [by_hand(text) for text in texts]


def test_the_kinds_of_tokens_are_those_of_the_tokenizer():
    assert token_kinds(Tokenizer()).tolist() == [0] * 30 + [2] * 10 + [1] + [0] * 10
    for without in (None, object()):
        assert token_kinds(without).tolist() == [0]
    beyond = {"input_ids": torch.tensor([[40, 77], [40, 78]])}
    assert text_hash(beyond, token_kinds(Tokenizer())).tolist() == [by_hand([77]), by_hand([78])]


# ------------------------------------------------------------------ the loss, on an encoder of tokens


class Encoder(nn.Module):
    """The mean of the tokens' vectors, called as a SentenceTransformer is."""

    def __init__(self, dim=6, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(50, dim, dtype=dtype)

    def get_embedding_dimension(self):
        return self.tokens.embedding_dim

    def forward(self, features):
        mask = features["attention_mask"][..., None].to(self.tokens.weight.dtype)
        features["sentence_embedding"] = (self.tokens(features["input_ids"]) * mask).sum(1) / mask.sum(1)
        features["attention_mask"].zero_()  # a module may do that: texts are compared before
        return features


def new(size=20, scale=5.0, **options):
    return MemoryRankingLoss(Encoder(), size, scale, **{"dtype": torch.float64, **options})


def batch(m=4, columns=2, seed=0):
    draw = random.Random(seed)
    return [[[draw.randrange(1, 50) for _ in range(draw.randint(2, 6))] for _ in range(m)] for _ in range(columns)]


def call(loss, columns):
    return loss([padded(column) for column in columns])


def embedded(loss, texts):
    return F.normalize(loss.model(padded(texts))["sentence_embedding"])


def by_cross_entropy(loss, columns, past=()):
    """One direction: the softmax of each anchor over all documents, and over the past ones (embedding, positive, anchor).

    The documents get the gradient of the softmax over the batch.
    """
    anchors, positives, *negatives = columns
    documents = [*positives, *(text for column in negatives for text in column)]
    seen = {tuple(text) for column in columns for text in column}
    stale = [v for v, d, q in past if not {tuple(d), tuple(q)} & seen]
    v, live, own = embedded(loss, anchors), embedded(loss, documents), torch.arange(len(anchors))
    whole = F.cross_entropy(loss.scale * v @ torch.cat([live.detach(), *stale]).T, own)
    in_batch = F.cross_entropy(loss.scale * v.detach() @ live.T, own)
    return whole + in_batch - in_batch.detach()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [2, 3, 5])
def test_it_is_the_cross_entropy_over_batch_and_past(columns, symmetric):
    loss, documents, anchors = new(size=11, symmetric=symmetric), [], []
    for k in range(5):
        given = batch(m=3 + k % 2, columns=columns, seed=k)
        found = call(loss, given)
        expected = by_cross_entropy(loss, given, documents)
        if symmetric:
            expected = (expected + by_cross_entropy(loss, [given[1], given[0]], anchors)) / 2
        assert torch.allclose(found, expected, atol=1e-12)
        weight = loss.model.tokens.weight
        for mine, theirs in zip(torch.autograd.grad(found, weight), torch.autograd.grad(expected, weight)):
            assert torch.allclose(mine, theirs, atol=1e-12)
        with torch.no_grad():
            for memory, column in ((documents, given[1]), (anchors, given[0])):
                memory += [(v[None], d, q) for v, d, q in zip(embedded(loss, column), given[1], given[0])]
                del memory[:-11]
            weight += 0.1
    assert torch.equal(loss.documents.embeddings, torch.cat([v for v, *_ in documents]))
    assert symmetric == (loss.anchors is not None)


def test_a_positive_that_occurs_twice_in_a_batch_is_a_positive_for_both():
    loss, (anchors, positives) = new(), batch()
    positives[2] = positives[0]
    S = loss.scale * embedded(loss, anchors) @ embedded(loss, positives).T
    log_p = S.log_softmax(1)
    expected = -torch.stack([(log_p[0, 0] + log_p[0, 2]) / 2, log_p[1, 1], (log_p[2, 0] + log_p[2, 2]) / 2, log_p[3, 3]])
    assert torch.allclose(call(loss, [anchors, positives]), expected.mean())


def test_a_negative_that_is_anothers_positive_is_not_its_negative():
    loss, columns = new(), batch(columns=3)
    columns[2][1] = columns[1][0]
    S = loss.scale * embedded(loss, columns[0]) @ embedded(loss, columns[1] + columns[2]).T
    log_p = S.log_softmax(1)
    expected = -torch.stack([(log_p[0, 0] + log_p[0, 5]) / 2, log_p[1, 1], log_p[2, 2], log_p[3, 3]])
    assert torch.allclose(call(loss, columns), expected.mean())


@pytest.mark.parametrize(("column", "old"), [(1, 1), (0, 0), (0, 1), (2, 1), (1, 0)])
def test_a_pair_in_memory_that_shares_a_text_with_the_batch_is_left_out(column, old):
    """(1, 1) the same document, (0, 0) another one of the same question, (0, 1) the question itself as a document."""
    loss, first, second = new(), batch(columns=3, seed=1), batch(columns=3, seed=2)
    second[column][3] = first[old][2]
    past = [(v[None].detach(), d, q) for v, d, q in zip(embedded(loss, first[1]), first[1], first[0])]
    call(loss, first)
    left = others(loss.documents, torch.cat([text_hash(padded(column)) for column in second]))
    assert len(left.labels) == 3 and len(loss.documents) == 4
    assert torch.allclose(call(loss, second), by_cross_entropy(loss, second, past))


def test_a_sentence_may_be_its_own_positive():
    """As in SimCSE, where two passes differ by dropout."""
    loss, (sentences, others_) = new(), batch()
    for _ in range(2):  # the second time, the memory has the same sentences and leaves them out
        assert torch.allclose(call(loss, [sentences, sentences]), by_cross_entropy(loss, [sentences, sentences]))
    assert len(loss.documents) == 8
    call(loss, [others_, others_])


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_evaluation_compares_within_the_batch_and_enqueues_nothing(how):
    loss, given = new(symmetric=True), batch(seed=5)
    empty = call(new(symmetric=True), given)
    call(loss, batch())
    before = copy.deepcopy(loss.state_dict())
    if how == "eval":
        loss.model.eval()
        found = call(loss, given)
    else:
        with torch.no_grad():
            found = call(loss, given)
    assert torch.equal(found, empty)
    assert all(torch.equal(before[name], value) for name, value in loss.state_dict().items())


def test_half_precision_embeddings_are_compared_in_single():
    loss = MemoryRankingLoss(Encoder(dtype=torch.bfloat16), 9, dtype=torch.float16)
    found = call(loss, batch())
    assert found.dtype == torch.float32 and loss.documents.rows.dtype == torch.float16
    found.backward()
    assert loss.model.tokens.weight.grad.dtype == torch.bfloat16


def test_the_scale_is_learned_if_asked():
    loss = new(learn_temperature=True, scale=8)
    assert [name for name, _ in loss.named_parameters()] == ["model.tokens.weight", "loss_fn.log_temperature"]
    call(loss, batch()).backward()
    gradient = loss.loss_fn.log_temperature.grad
    assert gradient != 0 and loss.scale == pytest.approx(8)
    with torch.no_grad():
        loss.loss_fn.log_temperature -= 0.5
    assert loss.scale > 8 and loss.temperature == pytest.approx(1 / loss.scale)
    assert not new().loss_fn.log_temperature and new(scale=30).scale == 30


def test_its_state_is_all_but_the_model_wherever_it_is_kept():
    loss = new(learn_temperature=True, symmetric=True)
    call(loss, batch())
    names = {*loss.state_dict()}
    assert names and not [name for name in names if "tokens" in name] and "loss_fn.log_temperature" in names
    other = new(learn_temperature=True, symmetric=True, scale=50)
    with torch.no_grad():
        other.model.tokens.weight += 1
    before = other.model.tokens.weight.clone()
    assert str(other.load_state_dict(loss.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(other.model.tokens.weight, before) and other.scale == pytest.approx(5)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), loss.state_dict().values()))
    outer = nn.ModuleDict({"inner": new(learn_temperature=True, symmetric=True)})
    assert {f"inner.{name}" for name in names} == {*outer.state_dict()}
    outer.load_state_dict({f"inner.{name}": value for name, value in loss.state_dict().items()})
    assert torch.equal(outer["inner"].documents.rows, loss.documents.rows)


def test_what_does_not_fit_is_refused_in_one_sentence():
    loss = new()
    with pytest.raises(InputError, match="expected the columns"):
        call(loss, batch(columns=1))
    image = {**padded(TEXTS[:2]), "pixel_values": torch.zeros(2, 3)}
    with pytest.raises(InputError, match="got pixel_values: use text"):
        loss([image, image])
    with pytest.raises(InputError, match="by their input_ids, got sentence_embedding"):
        loss([{"sentence_embedding": torch.zeros(2, 6)}] * 2)
    with pytest.raises(InputError, match="must be a SentenceTransformer, got 'all-MiniLM'"):
        MemoryRankingLoss("all-MiniLM", 10)
    with pytest.raises(InputError, match="scale must be positive, got 0"):
        new(scale=0)
    with pytest.raises(InputError, match="embedding dimension"):
        MemoryRankingLoss(nn.Linear(2, 2), 4)
    with pytest.raises(InputError, match="positive integers"):
        new(size=0)
    loss.model.tokens = nn.Embedding(50, 4, dtype=torch.float64)
    with pytest.raises(InputError, match="MatryoshkaLoss"):
        call(loss, batch())
    assert len(loss.documents) == 0


# ------------------------------------------------------------------ several processes


def play(world: int, sizes: list[list[int]], symmetric: bool) -> dict:
    """An encoder trained for some steps; the same on one process (world 0) and on many. Some texts come again."""
    loss = new(size=17, symmetric=symmetric, learn_temperature=True)  # as in a script, where the process group comes later
    loss.loss_fn.double()
    for memory in filter(None, (loss.documents, loss.anchors)):
        memory.ranks = Ranks.alone()
    if world:
        loss.model = nn.parallel.DistributedDataParallel(loss.model)
        rank = torch.distributed.get_rank()
    optimizer, values = torch.optim.SGD(loss.parameters(), lr=0.1), []
    for k, split in enumerate(sizes):
        columns = batch(m=6, columns=3, seed=k % 3)
        columns[1][0], columns[2][5] = columns[1][4], columns[1][1]
        if k == 4:  # past documents have other anchors now: they are recognized by themselves, on either process
            columns[0] = batch(m=6, columns=1, seed=9)[0]
        if world:
            start = sum(split[:rank])
            columns = [column[start : start + split[rank]] for column in columns]
        value = call(loss, columns)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    weights = [parameter.detach() for parameter in loss.parameters()]
    return {"values": values, "weights": weights, "state": loss.state_dict()}


SIZES = [[3, 3], [2, 4], [5, 1], [3, 3], [1, 5]]


def play_all() -> list[dict]:
    return [play(2, SIZES, symmetric) for symmetric in (False, True)]


def test_several_processes_are_one():
    ranks = on_ranks(2, play_all)
    for number, symmetric in enumerate((False, True)):
        alone = play(0, SIZES, symmetric)
        for each in (rank[number] for rank in ranks):
            assert each["values"] == pytest.approx(alone["values"], rel=1e-9)
            for mine, theirs in zip(each["weights"], alone["weights"]):
                assert torch.allclose(mine, theirs, rtol=1e-9)
            for name, value in alone["state"].items():
                assert torch.allclose(each["state"][name].double(), value.double(), rtol=1e-9), name
