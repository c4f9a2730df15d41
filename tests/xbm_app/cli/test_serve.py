from tests.tiny import xbm


def test_bad_input_is_one_sentence(tmp_path, monkeypatch):
    code, _, err = xbm("serve", tmp_path, "--port", 0)
    assert code == 2 and "is not an index: make one with `xbm index" in err and err.count("\n") == 1
    monkeypatch.setattr("xbm_app.extras.find_spec", lambda name: None)
    code, _, err = xbm("serve", tmp_path)
    assert code == 2 and "faiss, fastapi, uvicorn, python_multipart: pip install 'xbm[search]'" in err


def test_the_options_reach_the_server(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("xbm_app.serve.server.serve", lambda *given: asked.append(given))
    monkeypatch.setenv("XBM_TOKEN", "mine")
    assert xbm("serve", "a", "b", "--host", "0.0.0.0", "--port", 9, "--allow-host", "x", "--allow-host", "y").code == 0
    ((folders, *rest),) = asked
    assert [path.name for path in folders] == ["a", "b"] and rest == ["0.0.0.0", 9, ["x", "y"], "mine"]
