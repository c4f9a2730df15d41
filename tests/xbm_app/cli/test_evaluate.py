import json

import numpy as np
import pytest
import torch

from tests.tiny import xbm
from xbm.errors import InputError
from xbm.retrieval import evaluate
from xbm_app.cli.runs import evaluate_npz, show_scores
from xbm_app.cli.train import show


def test_a_run_is_scored_from_its_checkpoint(finished, tmp_path):
    code, out, err = xbm("evaluate", finished, "--json", tmp_path / "scores.json")
    assert code == 0, err
    result, again = (json.loads(path.read_text()) for path in (finished / "result.json", tmp_path / "scores.json"))
    assert again["protocols"]["test"] == pytest.approx(result["protocols"]["test"])
    assert f"{100 * result['recall@1']:.2f}" in out and "after 17 iterations" in out


def test_moved_data_is_told_with_root(finished, own_photos, tmp_path):
    code, _, err = xbm("evaluate", finished, "--root", tmp_path)
    assert code == 2 and "is missing" in err
    assert xbm("evaluate", finished, "--root", own_photos).code == 0


def test_a_file_of_embeddings_is_scored_too(tmp_path):
    np.savez(tmp_path / "v.npz", embeddings=np.eye(6, 4, dtype=np.float32)[[0, 0, 1, 1, 2, 3]], labels=[0, 0, 1, 1, 2, 2])
    code, out, err = xbm("evaluate", tmp_path / "v.npz", "--ks", "1,3", "--json", tmp_path / "s.json")
    assert code == 0, err
    scores = json.loads((tmp_path / "s.json").read_text())
    assert scores["recall@1"] == pytest.approx(4 / 6) and "recall@3" in scores and "recall@10" not in scores
    assert "66.67 %" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere holds no checkpoint: pass a run folder"),
        (["nowhere.npz"], "nowhere.npz holds no checkpoint"),
    ],
)
def test_bad_input(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = xbm("evaluate", *words)
    assert code == 2 and message in err and err.count("\n") == 1


def test_ks_must_be_numbers(tmp_path):
    np.savez(tmp_path / "v.npz", embeddings=np.eye(2), labels=[0, 0])
    code, _, err = xbm("evaluate", tmp_path / "v.npz", "--ks", "1,ten")
    assert code == 2 and "got 'ten'" in err


def test_a_protocol_that_draws_galleries_shows_their_figures(capsys):
    """The row of VehicleID's one-per-class protocol must not show its leave-one-out figures."""
    both = {"recall@1": 0.9, "queries": 9, "one_per_class/recall@1": 0.123, "one_per_class/recall@1_std": 0.01}
    show({"protocols": {"small leave-one-out": {"recall@1": 0.9, "queries": 9}, "small one-per-class": both}, "iterations": 3})
    lines = capsys.readouterr().out.splitlines()
    header, row = (next(line for line in lines if word in line) for word in ("small", "recall@1"))
    assert header.index("leave-one-out") < header.index("one-per-class")
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["recall@1", "90.00", "12.30"]


def test_what_does_not_go_together_is_refused(finished, own_photos, tmp_path):
    np.savez(tmp_path / "v.npz", embeddings=np.eye(2), labels=[0, 0])
    code, _, err = xbm("evaluate", tmp_path / "v.npz", "--root", own_photos)
    assert code == 2 and "omit it for an .npz" in err
    code, _, err = xbm("evaluate", finished, "--ks", "1,2")
    assert code == 2 and "--ks is for .npz files" in err


def test_a_file_scores_like_its_arrays(tmp_path):
    torch.manual_seed(0)
    x, labels, ids = torch.randn(40, 6).half(), torch.arange(40) % 7, torch.arange(40) // 2
    np.savez(tmp_path / "one.npz", embeddings=x.numpy(), labels=labels.numpy(), ids=ids.numpy())
    assert evaluate_npz(tmp_path / "one.npz", (1, 3)) == evaluate(x, labels, ids=ids, ks=(1, 3))
    np.savez_compressed(
        tmp_path / "two.npz",
        embeddings=x[:10].numpy(),
        labels=labels[:10].numpy(),
        ids=ids[:10].numpy(),
        gallery_embeddings=x.numpy(),
        gallery_labels=labels.numpy(),
        gallery_ids=ids.numpy(),
    )
    expected = evaluate(x[:10], labels[:10], x, labels, ids[:10], ids, ks=(1,))
    assert evaluate_npz(tmp_path / "two.npz", (1,)) == expected


def test_files_that_do_not_fit_are_named_with_what_to_do(tmp_path):
    def refuses(match, **arrays):
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(InputError, match=match):
            evaluate_npz(tmp_path / "bad.npz")

    x = np.eye(3)
    refuses("bad.npz has no array 'labels'", embeddings=x)
    refuses("unknown array in .*bad.npz: 'label': did you mean 'labels'", embeddings=x, label=[0, 0, 1])
    refuses("bad.npz: 2 labels for 3 rows", embeddings=x, labels=[0, 1])
    refuses("bad.npz cannot be read", embeddings=x, labels=np.array([{}, 1, 2], dtype=object))
    with pytest.raises(InputError, match=r"missing\.npz does not exist"):
        evaluate_npz(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("embeddings")
    (tmp_path / "empty.npz").write_text("")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "bad.npz").read_bytes()[:200])
    for name in ("text.npz", "empty.npz", "cut.npz", "."):
        with pytest.raises(InputError, match=r"cannot be read as an \.npz file"):
            evaluate_npz(tmp_path / name)
    np.save(tmp_path / "single.npy", x)
    with pytest.raises(InputError, match="holds a single array"):
        evaluate_npz(tmp_path / "single.npy")


def test_the_table_shows_percent_and_counts(capsys):
    show_scores({"recall@1": 2 / 3, "map@r": 0.125, "queries": 12345})
    text = capsys.readouterr().out
    assert "66.67 %" in text and "12.50 %" in text and "12,345" in text
