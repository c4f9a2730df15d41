from dataclasses import replace

import pytest
import yaml

from xbm.errors import InputError
from xbm_app.train import config as configs
from xbm_app.train.config import Config, check, flat, from_dict, load, override, save, to_dict


def test_a_config_survives_the_way_through_a_file(tmp_path):
    config = override(Config(), {"optim.decay_at": (7, 9), "data.root": "/a b/ü", "loss.options": {"margin": 0.4}, "seed": 3})
    save(config, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == config
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("memory.ratio", "0.5", 0.5),
        ("optim.lr", "3e-4", 3e-4),
        ("optim.iterations", "34_000", 34_000),
        ("optim.decay_at", "100, 200", (100, 200)),
        ("optim.decay_at", "[100, 200]", (100, 200)),  # as a run's config.yaml has it
        ("optim.decay_at", " [100]", (100,)),
        ("optim.decay_at", "", ()),
        ("optim.decay_at", "[]", ()),
        ("memory.fill", "false", False),
        ("memory.fill", "on", True),
        ("data.root", "none", None),
        ("memory.momentum", "null", None),
        ("memory.momentum", "0.25", 0.25),
        ("loss.options", "{margin: 0.25}", {"margin": 0.25}),
        ("loss.options", "{margin: 1e-3, mining: false, variant: Ds}", {"margin": 1e-3, "mining": False, "variant": "Ds"}),
        ("log.every", 3.0, 3),
    ],
)
def test_settings_come_as_text_and_become_what_they_should_be(key, text, value):
    assert flat(override(Config(), {key: text}))[key] == value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optim.iterations", "many", "optim.iterations must be a whole number, not 'many'"),
        ("optim.iterations", 1.5, "optim.iterations must be a whole number"),
        ("optim.iterations", float("inf"), "optim.iterations must be a whole number"),
        ("optim.iterations", True, "optim.iterations must be a whole number"),
        ("memory.ratio", "half", "memory.ratio must be a number"),
        ("memory.ratio", False, "memory.ratio must be a number"),
        ("memory.fill", 1, "memory.fill must be true or false"),
        ("model.trunk", 7, "model.trunk must be text"),
        ("optim.decay_at", "soon", "optim.decay_at must be whole numbers separated by commas, not .soon"),
        ("optim.decay_at", "[100", r"optim.decay_at must be whole numbers separated by commas, not '\[100'"),
        ("optim.decay_at", 5, "optim.decay_at must be whole numbers separated by commas"),
        ("loss.options", "margin", "loss.options must be names and numbers"),
        ("loss.options", "{margin: [1]}", "loss.options must be names and numbers"),
        ("loss.options.margin", "", "loss.options.margin must be a number, true or false, or a word, not"),
        ("loss.options.margin", "{", "loss.options.margin must be a number, true or false, or a word, not"),
        ("loss.lr_factor", "much", "loss.lr_factor must be a number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(key, value, message):
    with pytest.raises(InputError, match=message):
        override(Config(), {key: value})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("memory.ration", "memory.ratio"), ("memry.start", "memory.start"), ("batchsize", "batch.size"), ("sed", "seed")],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(InputError, match=f"unknown setting '{key}': did you mean '{nearest}'"):
        override(Config(), {key: 1})


def test_one_option_of_a_loss_is_set_without_touching_the_others():
    config = override(Config(), {"loss.options": {"alpha": 2.0, "mining": True}})
    changed = override(config, {"loss.options.mining": "false", "loss.options.beta": "7"})
    assert changed.loss.options == {"alpha": 2.0, "mining": False, "beta": 7.0}
    assert config.loss.options == {"alpha": 2.0, "mining": True}
    with pytest.raises(InputError, match=r"unknown setting 'loss.options.a.b'"):
        override(config, {"loss.options.a.b": 1})


def test_a_section_is_no_setting_and_a_setting_no_section():
    for key in ("memory", "seed.start", "memory.start.now"):
        with pytest.raises(InputError, match="unknown setting"):
            override(Config(), {key: 1})
    with pytest.raises(InputError, match=r"memory must be a section with keys \(ratio, size, update"):
        from_dict({"memory": 3})


def test_an_unknown_key_in_a_file_names_the_nearest(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("memory:\n  rati: 0.5\n")
    with pytest.raises(InputError, match=r"unknown setting 'memory.rati': did you mean 'memory.ratio'"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "holds no settings"),
        ("", "holds no"),
        (b"\xff\xfe\x00", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_config_is_told_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_missing_file_is_told():
    with pytest.raises(InputError, match=r"nowhere.yaml does not exist"):
        load(configs.Path("nowhere.yaml"))


def test_a_folder_is_told_from_a_file(tmp_path):
    with pytest.raises(InputError, match=r"is a folder: pass a config file, such as .*config.yaml"):
        load(tmp_path)


def test_options_that_cannot_be_read_are_told():
    with pytest.raises(InputError, match=r"loss.options must be names and numbers, such as \{margin: 0.5\}"):
        override(Config(), {"loss.options": "{margin: 0.5"})


def test_code_in_a_file_does_not_run(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"seed: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    with pytest.raises(InputError):
        load(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "key",
    [
        "batch.size", "batch.per_class", "batch.accumulate", "memory.updates_per_step", "optim.iterations", "log.every",
        "log.checkpoint_every",
    ],
)  # fmt: skip
def test_counts_start_at_one(key):
    check(override(Config(), {key: 1}))
    with pytest.raises(InputError, match=f"{key} must be at least 1, got 0"):
        check(override(Config(), {key: 0}))


def test_negative_numbers_and_nan_are_refused():
    for key in ("seed", "memory.start", "memory.ratio", "data.holdout", "log.evaluate_every"):
        with pytest.raises(InputError, match=f"{key} must be at least .*, got -1"):
            check(override(Config(), {key: -1}))
    with pytest.raises(InputError, match=r"optim.lr must be at least 0, got nan"):
        check(override(Config(), {"optim.lr": "nan"}))


def test_a_seed_that_no_generator_takes_is_refused():
    check(override(Config(), {"seed": 2**63 - 1}))
    with pytest.raises(InputError, match="seed must be at most 9223372036854775807, got 9223372036854775808"):
        check(override(Config(), {"seed": 2**63}))


def test_a_run_without_any_loss_is_refused():
    nothing = {"memory.weight": 0, "memory.batch_weight": 0}
    with pytest.raises(InputError, match="no loss to train on"):
        check(override(Config(), nothing))
    check(override(Config(), {**nothing, "memory.batch_weight": 1}))
    check(override(Config(), {**nothing, "memory.ratio": 0}))


def test_choosing_on_the_test_classes_is_refused():
    with pytest.raises(InputError, match=r"set data.holdout=0.2"):
        check(override(Config(), {"log.evaluate_every": 10}))
    check(override(Config(), {"log.evaluate_every": 10, "data.holdout": 0.2}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim.weight_decay": -1}, "optim.weight_decay must be at least 0, got -1.0"),
        ({"optim.weight_decay": "nan"}, "optim.weight_decay must be at least 0, got nan"),
        ({"memory.weight": -1}, "memory.weight must be at least 0, got -1.0"),
        ({"optim.lr": "inf"}, "optim.lr must be finite, got inf"),
        ({"optim.decay_at": "-5"}, r"optim.decay_at must be iterations of at least 0, got \(-5,\)"),
        ({"loss.options": "{margin: .nan}"}, "margin in loss.options must be finite, got nan"),
    ],
)
def test_numbers_that_no_run_can_use_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        check(override(Config(), settings))


def test_flat_names_every_setting_once():
    names = flat(Config())
    assert {"seed", "memory.ratio", "optim.decay_at", "loss.options"} <= names.keys()
    assert all(override(Config(), {name: value}) == Config() for name, value in names.items())


def test_saving_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    save(Config(), path)

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(yaml, "safe_dump", refuse)
    with pytest.raises(OSError):
        save(replace(Config(), seed=5), path)
    assert load(path) == Config() and [each.name for each in sorted(tmp_path.iterdir())] == [
        "checksums.json",
        "config.yaml",
    ]
