"""Which inputs and models a step in chunks accepts: structures that are split, wrappers, batch normalization, refusals."""

from collections import UserDict, namedtuple
from functools import partial

import pytest
import torch
from torch import nn

from tests.steps import close, forget, gradients, net, spread
from xbm import InputError, cached_backward

Pair = namedtuple("Pair", "left right")


class Encoding(UserDict):
    """As Hugging Face's BatchEncoding is: a mapping that is no dict."""


def test_inputs_keep_their_structure():
    x, y = torch.randn(5, 7), torch.arange(5)
    scale = torch.tensor(2.0)
    model, seen = net(), []

    def run(batch):
        seen.append(batch)
        return model(batch["x"]) * batch["more"][1][1]

    inputs = Encoding({"x": x, "more": [y, (x, scale), None], "names": Pair(y, "text"), "text": "as it is"})
    cached_backward(run, inputs, spread, chunk=3)
    found = gradients(model)
    forget(model)
    spread(model(x) * 2).backward()
    close(found, gradients(model))
    first, second, *_ = seen
    assert type(first) is dict and list(first) == list(inputs) and type(first["names"]) is Pair
    assert second["more"][0].tolist() == second["names"].left.tolist() == [3, 4] and second["names"].right == "text"
    assert torch.equal(first["more"][1][0], x[:3]) and first["more"][1][1] is scale and first["more"][2] is None
    assert first["text"] == "as it is" and type(first["more"]) is list and type(first["more"][1]) is tuple


def test_a_hugging_face_encoding():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = transformers.BertModel(transformers.BertConfig(**sizes))  # with dropout
    words, mask = torch.randint(0, 30, (7, 4)), torch.ones(7, 4, dtype=torch.int64)
    torch.manual_seed(1)
    parts = [model(input_ids=words[a : a + 3], attention_mask=mask[a : a + 3]).pooler_output for a in (0, 3, 6)]
    spread(torch.cat(parts)).backward()
    expected = gradients(model)
    forget(model)
    torch.manual_seed(1)
    encoding = transformers.BatchEncoding({"input_ids": words, "attention_mask": mask})
    cached_backward(lambda batch: model(**batch).pooler_output, encoding, spread, chunk=3)
    close(gradients(model), expected)


def test_a_model_that_adds_to_its_features_as_sentence_transformers_do():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, features):
            features["sentence_embedding"] = self.net(features["x"])
            return features

    model, features = Adds(), {"x": torch.randn(5, 7)}
    cached_backward(lambda batch: model(batch)["sentence_embedding"], features, spread, chunk=3)
    found = gradients(model)
    forget(model)
    spread(model.net(features["x"])).backward()
    close(found, gradients(model))
    assert list(features) == ["x"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk": 0}, "chunk must be"),
        ({"chunk": 2.0}, "chunk must be"),
        ({"chunk": True}, "chunk must be"),
        ({"inputs": torch.randn(0, 7)}, "at least 1 row"),
        ({"inputs": (torch.randn(4, 7), torch.randn(5, 7))}, r"\[4, 5\]"),
        ({"inputs": ["a text", "another"]}, "tokenizer"),
        ({"inputs": torch.tensor(1.0)}, "without any"),
        ({"model": 3}, "callable"),
        ({"model": lambda part: {"x": part}}, "got dict: wrap it"),
        ({"model": lambda part: part.sum()}, r"shape \(\): wrap it"),
        ({"model": lambda part: part[:1]}, r"tensor \(2, D\)"),
        ({"model": lambda part: part.long()}, "int64"),
        ({"model": lambda part: part[:, : 2 + len(part)]}, "the same for every chunk"),
        ({"model": (net(), net())}, "2 models need"),
        ({"model": (net(), net()), "inputs": [torch.randn(4, 7)]}, "2 models need as many inputs, in a tuple or list, got 1"),
        ({"model": (), "inputs": ()}, "0 models"),
    ],
)
def test_invalid_arguments_are_refused(change, words):
    arguments = {"model": net(), "inputs": torch.randn(5, 7), "chunk": 2, **change}
    with pytest.raises(InputError, match=words):
        cached_backward(arguments["model"], arguments["inputs"], spread, chunk=arguments["chunk"])


# ------------------------------------------------------------------ batch normalization


class Wrapped:
    def __init__(self, model):
        self.model = model

    def embed(self, part):
        return self.model(part)

    __call__ = embed


class Trainer:
    """Has the model as one of several attributes and is no callable itself."""

    def __init__(self, model):
        self.model, self.towers = model, {"query": model}
        self.teacher = nn.BatchNorm1d(5)  # not used by the functions below

    def embed(self, part):
        return self.model(part)

    def embed_query(self, part):
        return self.embed(part)


def function_of(trainer):
    return lambda x: trainer.model(x)


WRAPPERS = [
    lambda m: m,
    lambda m: lambda x: m(x),
    lambda m: partial(m),
    lambda m: m.forward,
    Wrapped,
    lambda m: Trainer(m).embed,
    lambda m: Trainer(m).embed_query,
    lambda m: function_of(Trainer(m)),
    lambda m: lambda x, towers={"query": m}: towers["query"](x),
    lambda m: partial(lambda towers, x: towers[0](x), [m]),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_batch_normalization_by_the_batch_is_refused_before_anything_runs(wrap):
    model, x = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), torch.randn(6, 7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=r"eval\(\)"):
        cached_backward(wrap(model), x, spread)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model[1].eval()
    cached_backward(wrap(model), x, spread, chunk=4)
    found = gradients(model)
    forget(model)
    spread(model(x)).backward()
    close(found, gradients(model))
    model[1] = nn.BatchNorm1d(5, track_running_stats=False).eval()
    with pytest.raises(InputError, match="'1'"):
        cached_backward(wrap(model), x, spread)


OF_A_WEIGHT = {"parametrization": nn.utils.parametrizations.spectral_norm, "hook": nn.utils.spectral_norm}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*deprecated")
@pytest.mark.parametrize("form", OF_A_WEIGHT)
def test_spectral_normalization_in_train_mode_is_refused_before_anything_runs(form):
    model, x = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5)), torch.randn(6, 7)
    OF_A_WEIGHT[form](model[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for each, named in ((model, "1"), (nn.Sequential(nn.Flatten(), model), r"1\.1"), (model[1], "the model")):
        with pytest.raises(InputError, match=rf"the spectral norm of {named} changes .*: call eval\(\) on") as caught:
            cached_backward(each, x[:, :5] if each is model[1] else x, spread, chunk=4)
        assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model[1].eval()
    cached_backward(model, x, spread, chunk=4)
    found = gradients(model)
    forget(model)
    spread(model(x)).backward()
    close(found, gradients(model))


def test_group_and_layer_norm_in_train_mode_are_fine():
    model, x = nn.Sequential(nn.Linear(7, 6), nn.GroupNorm(2, 6), nn.LayerNorm(6)), torch.randn(6, 7)
    cached_backward(model, x, spread, chunk=4)
    found = gradients(model)
    forget(model)
    spread(model(x)).backward()
    close(found, gradients(model))


@pytest.mark.parametrize("kind", ["a module", "a function"])
def test_a_model_that_takes_the_entries_of_a_dict_as_arguments_says_how_to_call_it(kind):
    class Encoder(nn.Module):
        def forward(self, words, mask=None):
            return words.float() * mask

    model = Encoder() if kind == "a module" else lambda words, mask: words * mask
    inputs = {"words": torch.ones(4, 3), "mask": torch.ones(4, 1)}
    with pytest.raises(InputError, match=r"the model takes words, mask: call it by lambda batch: model\(\*\*batch\)") as error:
        cached_backward(model, inputs, spread)
    assert isinstance(error.value.__cause__, AttributeError | TypeError)


def test_other_errors_of_a_model_pass_through():
    def takes_a_dict(batch):
        return batch["x"].does_not_exist()

    with pytest.raises(AttributeError, match="does_not_exist"):
        cached_backward(takes_a_dict, {"x": torch.ones(4, 3)}, spread)


def test_a_loss_that_cannot_be_called_is_refused_before_the_model_runs():
    with pytest.raises(InputError, match="loss_fn must be callable, got Tensor"):
        cached_backward(None, torch.ones(4, 3), torch.ones(()))
