"""The claims page: what docs/claims.md says is what its results give, and a verdict follows from its findings."""

from pathlib import Path

import pytest

from paper import published
from paper.claims import CLAIMS, FAILS, HOLDS, IN_PART, NOT_YET, ONE_SEED, UNTESTABLE, Finding, claims_page, write_claims
from paper.experiments import ALL
from paper.record import Records
from paper.study import plan
from tests.paper.made_up import CARS, carry_out, invented

ROOT = Path(__file__).parents[2]
YES, NO, OPEN = Finding(True, "a"), Finding(False, "b"), Finding(None, "c")


def test_the_page_in_the_documents_is_the_one_that_its_results_give():
    page = claims_page(Records(ROOT / "paper" / "results"))
    assert (ROOT / "docs" / "claims.md").read_text() == page, "run `python -m paper report`"


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [([YES, YES], HOLDS), ([YES, NO], IN_PART), ([NO, OPEN], FAILS), ([YES, OPEN], HOLDS), ([OPEN], ONE_SEED), ([], NOT_YET)],
)
def test_a_verdict_follows_from_the_findings(findings, verdict):
    claim = next(claim for claim in CLAIMS if claim.check is not None)
    assert claim.verdict(findings) == verdict


def test_every_claim_has_a_test_or_says_why_it_has_none():
    assert len(CLAIMS) >= 20 and len({claim.text for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert (claim.check is None) == bool(claim.why) == (not claim.experiment) and (
            not claim.experiment or claim.experiment in ALL
        )
    assert {claim.verdict([]) for claim in CLAIMS} == {NOT_YET, UNTESTABLE}


def findings_of(text, records):
    return next(claim for claim in CLAIMS if claim.text == text).findings(records)


def test_claims_are_checked_by_the_results(tmp_path):
    """By invention: 10 points more with memory, 2.4 more from batch 16 to 256 whatever the memory, for all losses alike."""
    names = ["batch-size", "figure-1", "s-table-1", "s-table-2", "s-table-6", "tricks", "table-2", "lemma-1", "valid-negatives"]
    records = Records(tmp_path)
    carry_out([ALL[name] for name in (*names, "ms-outliers")], [CARS], 3, records)
    said = {
        "Old embeddings change a gradient by at most C · ε": False, "C is often below 1": False,
        "The memory has a hundred times as many valid negatives as the batch": True,
        "Multi-similarity weighs the hardest negatives more heavily": True,
        "Batch 16 with memory beats batch 256 without": True, "One percent of the images in memory already helps": True,
        "With memory, the batch size matters less": False, "On small data sets, a slow moving average helps": False,
        "Back-propagation to the memory brings no clear gain": True, "The memory costs at most 52 % more time and 0.2 GB": True,
        "Enqueuing ten batches per iteration brings no clear gain": True,
        "Freezing batch norm, or the trunk at lr / 10, adds 2 points on CUB and Cars": False,
    }  # fmt: skip
    for text, agrees in said.items():
        findings = findings_of(text, records)
        assert findings and {finding.agrees for finding in findings} == {agrees}, (text, findings)
        assert all(finding.text.startswith("cars, efficientnet_lite0") for finding in findings)


def test_one_seed_is_no_test(tmp_path):
    records = Records(tmp_path)
    carry_out([ALL["batch-size"]], [CARS], 1, records)
    (finding,) = findings_of("Batch 16 with memory beats batch 256 without", records)
    assert finding.agrees is None and finding.text.endswith("+7.6 (one seed)")


@pytest.mark.parametrize(("added", "agrees"), [(0.05, True), (-0.05, False), (0.0, False)])
def test_a_gain_has_to_be_shown(tmp_path, added, agrees):
    records = Records(tmp_path)

    def score(config):
        return 0.5 + (added + 0.001 * config.seed if config.memory.ratio else 0.0)

    while ready := plan([ALL["s-table-3-tuned"]], [CARS], 3, records).ready:
        for task in ready:
            records.write(invented(task, score))
    (finding,) = findings_of("The memory raises R@1 of the contrastive loss", records)
    assert finding.agrees is agrees


def test_the_contradictions_are_those_of_the_papers_tables(tmp_path):
    text = write_claims(Records(tmp_path / "none"), tmp_path).read_text()
    assert "**27 claims.** not run yet: 24; not testable here: 3." in text
    tables = text.split("contradict itself")[1]
    compared = {trunk: row for name, trunk, row in published.TABLE_4 if name == "contrastive w/ M"}
    for value in (
        published.TABLE_1["sop"]["contrastive w/ M"][0], published.TABLE_3[13][2][0], published.S_TABLE_1["sop"][0],
        published.TABLE_1["sop"]["contrastive"][0], published.TABLE_2["batch 64"][2], compared["G512"][0],
        published.TABLE_1["inshop"]["contrastive w/ M"][0], published.S_TABLE_1["inshop"][0],
        published.S_TABLE_1["cars"][-1], published.S_TABLE_1["cub"][-1],
    ):  # fmt: skip
        assert str(value) in tables
    assert published.TABLE_1_VEHICLEID["MS"] == next(
        row for name, trunk, row in published.TABLE_5 if (name, trunk) == ("MS", "B512")
    )
    assert 25_882 + 14_218 + 12_612 == 52_712 and round(100 * (3.19 / 2.10 - 1)) == 52
    assert published.S_TABLE_7["cub"][4] not in published.ALPHAS
