from tests.tiny import xbm


def test_the_parity_is_printed_and_the_folder_last(searchable, tmp_path):
    code, out, err = xbm("export", searchable, "--out", tmp_path / "model")
    assert code == 0, err
    onnx, program, last = out.splitlines()
    assert onnx.startswith("model.onnx: ") and "largest difference from the run" in onnx and "36 test images" in onnx
    assert program.startswith("model.pt2: ") and last == str(tmp_path / "model") and err == ""


def test_bad_input(tmp_path, monkeypatch):
    code, _, err = xbm("export", tmp_path / "nowhere")
    assert code == 2 and "does not exist: give a run folder" in err
    code, _, err = xbm("export", tmp_path)
    assert code == 2 and "holds no checkpoint" in err
    monkeypatch.setattr("xbm_app.extras.find_spec", lambda name: None)
    code, _, err = xbm("export", tmp_path)
    assert code == 2 and "pip install 'xbm[search]'" in err and err.count("\n") == 1
