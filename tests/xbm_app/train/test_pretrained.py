"""A model that is shared: the same embeddings from its folder, nothing about this machine in it, an error for what is none."""

import json
import shutil
import warnings

import pytest
import torch

import xbm
from tests.tiny import draw_photos
from xbm.errors import DamagedFileError, InputError
from xbm_app.train import pretrained

pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def shared(searchable, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared") / "model"
    assert xbm.load(searchable).save_pretrained(folder) is None
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return sorted(draw_photos(tmp_path_factory.mktemp("others") / "photos", classes=2, each=4).rglob("*.png"))


def test_the_embeddings_are_the_same_bit_for_bit(searchable, shared, images):
    wanted = xbm.load(searchable).embed(images)
    for model in (xbm.from_pretrained(shared), xbm.from_pretrained(str(shared), device="cpu"), xbm.load(shared)):
        assert torch.equal(model.embed(images), wanted)
    assert (model.step, model.classes) == (100, xbm.load(searchable).classes)


def test_a_shared_model_can_be_shared_again(shared, tmp_path):
    xbm.from_pretrained(shared).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors", "checksums.json"}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (shared / path.name).read_bytes(), path.name


def test_the_card_has_the_figures_and_the_metadata_of_the_hub(searchable, shared):
    card = (shared / "README.md").read_text()
    recall = json.loads((searchable / "result.json").read_text())["recall@1"]
    assert card.startswith("---\nlibrary_name: xbm\npipeline_tag: image-feature-extraction\ntags:\n")
    assert "\n# Model card: photos, small\n" in card and f"| {100 * recall:.1f} |" in card
    assert "36 training images of 6 classes" in card and 'xbm.from_pretrained("NAME")' in card and "(1, 12) unit rows" in card


def test_no_folder_of_this_machine_is_shared(own_photos, searchable, shared):
    content = b"".join(path.read_bytes() for path in shared.iterdir())
    for path in (own_photos, own_photos.parent, searchable.parent):
        assert str(path).encode() not in content
    assert json.loads((shared / "config.json").read_text())["config"]["data"]["root"] is None


def test_an_upload_has_these_files(searchable, monkeypatch):
    from types import SimpleNamespace

    from huggingface_hub import HfApi

    sent = {}

    def upload(self, *, repo_id, folder_path, **_):
        sent[repo_id] = {path.name for path in folder_path.iterdir()}
        return "the address"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    assert xbm.load(searchable).push_to_hub("me/birds", private=True) == "the address"
    assert sent == {"me/birds": {"README.md", "config.json", "model.safetensors", "checksums.json"}}


def test_damage_is_noticed(shared, tmp_path):
    warnings.simplefilter("ignore")  # about files without checksums
    for name in ("model.safetensors", "config.json"):
        folder = shutil.copytree(shared, tmp_path / name)
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        with pytest.raises(DamagedFileError, match=name):
            xbm.from_pretrained(folder)
        (folder / "checksums.json").unlink()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(DamagedFileError, match=name):
            xbm.from_pretrained(folder)


@pytest.mark.parametrize("name", ["nobody/nothing", "no such folder/a/b"])
def test_what_is_neither_a_folder_nor_on_the_hub_is_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is no folder, and the hub has no model of that name"):
        xbm.from_pretrained(name, cache_dir=tmp_path / "cache")


def test_a_run_is_no_shared_model(searchable):
    with pytest.raises(InputError, match=r"holds no model.safetensors: pass a folder that `save_pretrained` wrote"):
        xbm.from_pretrained(searchable)


def test_another_model_with_a_config_is_refused(tmp_path, shared):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / pretrained.WEIGHTS).write_bytes((shared / pretrained.WEIGHTS).read_bytes())
    with pytest.raises(DamagedFileError, match=r"config\.json"):
        xbm.from_pretrained(tmp_path)


def test_without_the_package_the_error_names_it(searchable, tmp_path, monkeypatch):
    pretrained.hub_model.cache_clear()
    monkeypatch.setattr("xbm_app.extras.find_spec", lambda name: None if name == "huggingface_hub" else name)
    with pytest.raises(InputError, match=r"pip install 'xbm\[hub\]'"):
        xbm.load(searchable).save_pretrained(tmp_path / "model")
