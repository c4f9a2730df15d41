"""`check_loss` passes for every loss of the package and fails, with one sentence, for every way of getting one wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.known import NAMES
from xbm import ContrastiveLoss, InputError, MultiSimilarityLoss, PairLoss
from xbm.engine import streaming
from xbm.engine.terms import Combined, Terms
from xbm.losses import LOSSES
from xbm.testing import cases, check_loss


@pytest.mark.parametrize("name", NAMES)
def test_every_loss_of_the_package_passes(name):
    check_loss(LOSSES[name](), finite_differences=name != "circle")


def test_other_hyper_parameters_pass_too():
    check_loss(MultiSimilarityLoss(alpha=1.3, beta=11.0, base=0.2, epsilon=0.3, mining=False))
    check_loss(ContrastiveLoss(margin=-0.3))


class Sound(PairLoss):
    """L_i = Σ_P (1 − S) + Σ_N [S − 0.3]₊², with every reduction."""

    def dense(self, S, positive, negative):
        valid = negative & (S > 0.3)
        attract, repel = ((1 - S) * positive).sum(1), ((S - 0.3) ** 2 * valid).sum(1)
        if self.reduction == "mean":
            return attract / positive.sum(1).clamp(min=1) + repel / valid.sum(1).clamp(min=1)
        if self.reduction == "balanced":
            pull, push = positive.sum(1), (2 * (S.detach() - 0.3) * valid).sum(1)
            return attract + repel * (pull.clamp(min=1) / push.clamp(min=1)).clamp(max=1)
        return attract + repel

    def floor(self, p):
        return 0.3

    def negative(self, s, p, expand):
        return Terms(value=(s - 0.3) ** 2, weight=2 * (s - 0.3))

    def positive(self, s, n, expand):
        return Terms(value=1 - s, weight=1.0)


def test_a_sound_loss_of_ones_own_passes():
    check_loss(Sound())


class Hinge(PairLoss):
    """Both sides stop at a bound, so the weights are 0 or 1: in the three types in which one writes that."""

    def __init__(self, weigh):
        super().__init__("sum")
        self.weigh = weigh

    def dense(self, S, positive, negative):
        return ((0.9 - S).relu() * positive).sum(1) + ((S - 0.2).relu() * negative).sum(1)

    def floor(self, p):
        return 0.2

    def negative(self, s, p, expand):
        return Terms(value=(s - 0.2).relu(), weight=self.weigh(s > 0.2))

    def positive(self, s, n, expand):
        return Terms(value=(0.9 - s).relu(), weight=self.weigh(s < 0.9))


@pytest.mark.parametrize(
    "weigh", [lambda x: torch.where(x, 1.0, 0.0), lambda x: x, lambda x: x.double()], ids=["float32", "bool", "float64"]
)
def test_weights_of_any_type_are_those_of_the_similarities(weigh):
    check_loss(Hinge(weigh), reductions=["sum"])


class WrongWeight(Sound):
    def negative(self, s, p, expand):
        return Terms(value=(s - 0.3) ** 2, weight=s - 0.3)


class WrongSign(Sound):
    def positive(self, s, n, expand):
        return Terms(value=1 - s, weight=-1.0)


class WrongValue(Sound):
    def positive(self, s, n, expand):
        return Terms(value=s - 1, weight=1.0)


class NoFloor(Sound):
    def floor(self, p):
        return -torch.inf


class OtherFloor(Sound):
    def floor(self, p):
        return 0.31


class WrongCombine(Sound):
    def combine(self, p, n):
        return Combined(p.value + n.value, positive_sum=1.0, negative_sum=0.5)


class WrongLoss(Sound):
    def combine(self, p, n):
        return super().combine(p, n)._replace(loss=p.value)


class NoValidity(Sound):
    """The hinge of a positive is in its value, but not in its validity."""

    def dense(self, S, positive, negative):
        return super().dense(S, positive, negative) - ((1 - S) * (positive & (S > 0.9))).sum(1)


class WrongMean(Sound):
    """Averages over all negatives instead of the valid ones."""

    def dense(self, S, positive, negative):
        if self.reduction != "mean":
            return super().dense(S, positive, negative)
        repel = ((S - 0.3).relu() ** 2 * negative).sum(1) / negative.sum(1).clamp(min=1)
        return ((1 - S) * positive).sum(1) / positive.sum(1).clamp(min=1) + repel


class Relative(PairLoss):
    """Negatives count from the lowest positive on."""

    def dense(self, S, positive, negative):
        lowest = S.masked_fill(~positive, torch.inf).amin(1, keepdim=True).detach().clamp(max=1.0)
        return ((1 - S) * positive).sum(1) + ((S - lowest + 1).relu() * negative).sum(1)

    def negative(self, s, p, expand):
        above = s - expand(p.lowest.clamp(max=1.0)) + 1
        return Terms(value=above.relu(), weight=(above > 0).to(s.dtype))

    def positive(self, s, n, expand):
        return Terms(value=1 - s, weight=1.0)


class NoExpand(Relative):
    """Right for a tile, where anchors are columns, and wrong for a list of pairs."""

    floor = Sound.floor

    def dense(self, S, positive, negative):
        return super().dense(S, positive, negative & (S > 0.3))

    def negative(self, s, p, expand):
        return super().negative(s, p, lambda x: x)


class HiddenExtremes(Relative):
    """States that it ignores the extremes, and does not."""

    ignores_extremes = True


class Shapeless(Sound):
    def dense(self, S, positive, negative):
        return super().dense(S, positive, negative).mean()


class Detached(Sound):
    """A part of `dense` is a constant to autograd, and the one-pass form agrees with it."""

    def dense(self, S, positive, negative):
        return ((1 - S) * positive).sum(1) + ((S - 0.3) * (S.detach() - 0.3) * (negative & (S > 0.3))).sum(1)

    def negative(self, s, p, expand):
        return Terms(value=(s - 0.3) ** 2, weight=s - 0.3)


class Unfinished(PairLoss):
    def dense(self, S, positive, negative):
        return ((1 - S) * positive).sum(1)


class NotANumber(Sound):
    """log 0 for an anchor without positives, in the plain formula only."""

    def dense(self, S, positive, negative):
        return super().dense(S, positive, negative) + 0 * ((1 - S) * positive).sum(1).detach().log()


@pytest.mark.parametrize(
    ("kind", "reductions", "sentence"),
    [
        (WrongWeight, ["sum"], r"the weight of a negative of anchor \d at S = \S+ is \S+, expected \S+, the derivative of"),
        (WrongWeight, ["mean"], r"WrongWeight\(reduction='mean'\), some anchors against some rows: the weight of a negative"),
        (WrongSign, ["sum"], r"the weight of a positive of anchor \d at S = \S+ is -1, expected 1, .*: check `positive` and"),
        (WrongValue, ["sum"], r"the loss of anchor \d is \S+, expected \S+, the value of `dense`"),
        (NoFloor, ["sum"], r"the weight of a negative .* at S = -0\.\d+ is -\S+, expected 0, .*: check `floor`, `negative`"),
        (OtherFloor, ["sum"], r"the weight of a negative .* at S = 0\.30\d+ is 0, expected 0\.0"),
        (WrongCombine, ["sum"], r"the weight of a negative .*and `combine`"),
        (WrongLoss, ["sum"], r"the loss of anchor \d is"),
        (NoValidity, ["sum"], r"the weight of a positive of anchor \d at S = 0\.9\d+ is 1, expected 0"),
        (WrongMean, ["sum", "mean"], r"WrongMean\(reduction='mean'\), .*: the weight of a negative"),
        (NoExpand, ["sum"], r"many rows, few of them near: engine='streaming' raised RuntimeError"),
        (HiddenExtremes, ["sum"], r"many rows of two classes: the loss is \S+ with engine='streaming', expected \S+ as with"),
        (Shapeless, ["sum"], r"`dense` returned shape \(\), expected one loss per anchor, \(5,\)"),
        (Detached, ["sum"], r"derivative of `dense` for anchor \d .* by autograd, expected .*difference: .*detached part"),
        (Unfinished, ["sum"], r"the loss must state `dense`, `negative` and `positive`"),
        (NotANumber, ["sum"], r"an anchor without positives: the loss of anchor 1 is \S+, expected nan"),
    ],
)
def test_a_wrong_loss_is_named_with_case_quantity_and_numbers(kind, reductions, sentence):
    with pytest.raises(AssertionError) as caught:
        check_loss(kind(), reductions=reductions, finite_differences=not issubclass(kind, Relative))
    said = str(caught.value)
    assert re.search(sentence, said), said
    assert said.startswith(f"{kind.__name__}(reduction=") and "\n" not in said


def test_a_part_that_is_meant_to_be_constant_passes_when_told():
    check_loss(Detached(), reductions=["sum"], finite_differences=False)
    check_loss(Relative(), reductions=["sum"], finite_differences=False)


def test_a_loss_with_parameters_is_refused():
    class Learned(Sound):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(InputError, match=r'Learned has parameters \(scale\) that only .*engine="reference"'):
        check_loss(Learned())


def test_a_loss_of_one_reduction_is_told_how_to_say_so():
    class OnlySum(Sound):
        def dense(self, S, positive, negative):
            return ((1 - S) * positive).sum(1) + ((S - 0.3).relu() ** 2 * negative).sum(1)

    check_loss(OnlySum(), reductions=["sum"])
    hint = r"does not compute this reduction, pass reductions=\['sum'\]"
    with pytest.raises(AssertionError, match=rf"^OnlySum\(reduction='mean'\), .*{hint}$"):
        check_loss(OnlySum())
    with pytest.raises(AssertionError) as told:  # who names the reductions means them
        check_loss(OnlySum(), reductions=["sum", "mean"])
    assert "reductions=" not in str(told.value)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (Sound, r"got the class Sound: pass an instance, Sound\(\)"),
        (nn.MSELoss, "got the class MSELoss$"),
        (nn.MSELoss(), "must be a PairLoss, got MSELoss$"),
    ],
)
def test_what_is_no_loss_is_refused(loss, says):
    with pytest.raises(InputError, match=says):
        check_loss(loss)


@pytest.mark.parametrize("side", ["negative", "positive"])
def test_a_tensor_instead_of_terms_is_refused(side):
    kind = type("Bare", (Sound,), {side: lambda self, s, other, expand: s})
    with pytest.raises(InputError, match=rf"Bare\.{side} returned Tensor: return Terms\(value=..., weight=...\)"):
        check_loss(kind())


def test_it_leaves_the_loss_and_the_random_numbers_alone():
    loss = ContrastiveLoss(margin=0.4, reduction="mean", engine="auto", exclude="copy")
    before = torch.get_rng_state()
    check_loss(loss)
    assert (loss.reduction, loss.engine, loss.exclude, loss.margin) == ("mean", "auto", "copy", 0.4)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_cases_are_what_they_say():
    """Every special case occurs, and every way in which the engine goes about a problem."""
    found = {case.name: case for case in cases()}

    def masks(name):
        case = found[name]
        return streaming_pairing(case).masks()

    def streaming_pairing(case):
        from xbm.engine.pairing import pair

        return pair(case.anchors, case.labels, case.memory, case.ids, case.exclude)

    positive, negative = masks("an anchor without positives")
    assert positive.any(0).tolist() == [True, False, True] and negative.any(0).all()
    positive, negative = masks("an anchor without negatives")
    assert positive.any(0)[0] and negative.any(0).tolist() == [False, True, True, True, True]
    assert not masks("no positives at all")[0].any() and masks("no positives at all")[1].any()
    assert not masks("no negatives at all")[1].any() and masks("no negatives at all")[0].any()
    assert not torch.cat(masks("an empty memory")).any()
    by_copy, by_instance = (masks(f"older copies of the anchors, exclude='{each}'")[0].sum() for each in ("copy", "instance"))
    assert by_copy > by_instance > 0
    assert found["rows with a gradient of their own"].memory.rows.requires_grad
    assert all(case.anchors.dtype == torch.float64 for case in found.values())


def test_the_engine_goes_every_way(monkeypatch):
    ways = set()

    def spy(owner, name, way):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (ways.add(way), original(*a, **k))[1])

    spy(streaming._Listed, "add_to", "positives listed")
    spy(streaming._Masked, "add_to", "positives by mask")
    spy(streaming._Listed, "weights", "rows' gradient of listed positives")
    spy(streaming._Masked, "weights", "rows' gradient of masked positives")
    spy(streaming, "_by_anchors", "all at once")
    spy(streaming.Sums, "add_list", "single pairs")
    spy(streaming.Sums, "add_tile", "tiles")
    check_loss(Sound(), reductions=["sum"], finite_differences=False)
    assert len(ways) == 7


def test_it_needs_no_test_framework():
    script = (
        "import sys\nsys.modules['pytest'] = None\nfrom xbm.testing import check_loss\nfrom xbm import ContrastiveLoss\n"
        "check_loss(ContrastiveLoss(), reductions=['sum'])"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# ------------------------------------------------------------------ the page that shows how

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_loss_of_the_page_runs_and_takes_ten_lines():
    (code,) = BLOCK.findall(PAGE.read_text())
    assert "check_loss(" in code
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    body = [line for line in code.split("class ")[1].split("\ncheck_loss")[0].splitlines() if line.strip()]
    assert len(body) <= 10
    with pytest.raises(AssertionError) as caught:
        exec(code.replace("weight=2 * s", "weight=s"), {"__name__": "page"})
    assert f"AssertionError: {caught.value}" in " ".join(PAGE.read_text().split())
