import numpy as np
import pytest
import torch

from xbm.errors import InputError
from xbm.retrieval import evaluate
from xbm_app.cli.evaluate_arrays import evaluate_npz, show_scores


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
