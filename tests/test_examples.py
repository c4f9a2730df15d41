"""Every example runs as its first lines say, in under a minute, and what it trains gets better."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {
    "lightning_trainer": "lightning",
    "text_pairs": "accelerate",
    "sentence_pairs": "sentence_transformers",
    "metric_learning": "pytorch_metric_learning",
    "text_memory": "sentence_transformers",
}


def run(*command: object, **environment: str) -> subprocess.CompletedProcess:
    around = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=around, timeout=180)


def tiny_text(folder: Path) -> list[object]:
    """The arguments of text_memory.py for 8 intents of made-up words, and a BERT of one layer that knows these words."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    draw, words = random.Random(0), [f"word{k}" for k in range(80)]
    rows = [(" ".join(draw.sample(words[10 * k : 10 * k + 10], 3) + draw.sample(words, 3)), f"intent {k}") for k in range(8)
            for _ in range(40)]  # fmt: skip
    (folder / "data.json").write_text(json.dumps({"train": rows[::2], "val": rows[1::4], "test": rows[3::4]}))
    vocabulary = {word: k for k, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    BertTokenizerFast(vocab=vocabulary).save_pretrained(folder / "bert")
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder / "bert")
    bert = Transformer(str(folder / "bert"))
    SentenceTransformer(modules=[bert, Pooling(32)], device="cpu").save(str(folder / "model"))
    model = ("--model", folder / "model", "--arm", "moving_average", "--rate", 3e-3, "--iterations", 60)
    return ["--data", folder / "data.json", *model]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_and_learns(path, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem], reason=f"{path.name} needs {NEEDS[path.stem]}")
    launcher = [sys.executable]
    if "torchrun" in path.read_text().splitlines()[0]:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    library = EXAMPLES.parent / "src" / "xbm"  # Python files with functions and docstrings
    arguments = {"two_towers": [library, "--iterations", 100, "--size", 64]}.get(path.stem, [])
    done = run(*launcher, path, *(tiny_text(tmp_path) if path.stem == "text_memory" else arguments))
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss['\"]?:? ?['\"]?([0-9.]+[0-9])", done.stdout)]
    if path.stem == "two_towers":  # without a memory, then with one, whose loss is another
        losses = losses[: len(losses) // 2]
    assert len(losses) >= 3 and losses[-1] < losses[0], done.stdout


@pytest.mark.slow
def test_two_network_namespaces_are_two_hosts(tmp_path):
    settings = ("optim.iterations=20", "optim.decay_at=15", "memory.start=5")
    words = [word for setting in settings for word in ("--set", setting)]
    done = run(EXAMPLES / "two_hosts.sh", tmp_path / "run", "--quiet", *words, PYTHON=sys.executable)
    if done.returncode == 77 or "command not found" in done.stderr:
        pytest.skip("network namespaces are not permitted here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "result.json").exists() and "bytes that went over the cable" in done.stdout
