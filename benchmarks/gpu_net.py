"""A training step of each trunk on a GPU, plain and fused: milliseconds in one CUDA graph, kernels and gradients.

    python -m benchmarks.gpu_net [--out FILE.json] [--trunks googlenet resnet50 efficientnet_lite0] [--batch 64] [--side 224]

The step is forward, backward and fused Adam in bfloat16 autocast, channels-last, on random images that stay on the device.
The loss is a fixed linear function of the embeddings, so that only the network is measured.
"""

import argparse
import copy
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_measure import Call, captured, timed
from xbm_app.models import EmbeddingModel, build_model
from xbm_app.models.fused import fuse

TRUNKS = ("googlenet", "resnet50", "efficientnet_lite0")


def loss_of(model: EmbeddingModel, images: Tensor, low: bool) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        embeddings = model(images)
    return (embeddings * torch.linspace(-1, 1, embeddings.shape[1], device="cuda")).sum()


def training_step(model: EmbeddingModel, images: Tensor) -> Call:
    optimizer = torch.optim.Adam(model.parameters(), 1e-5, fused=True, capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, images, low=True).backward()
        optimizer.step()

    return step


def kernels(replay: Call, runs: int = 5) -> list[dict[str, Any]]:
    """Returns milliseconds and calls of every kernel in a replay, longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(runs):
            replay()
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in seen.key_averages():
        totals[event.key[:110]][0] += event.self_device_time_total / 1000 / runs
        totals[event.key[:110]][1] += event.count / runs
    rows = [{"kernel": name, "ms": ms, "calls": round(calls)} for name, (ms, calls) in totals.items() if ms > 0]
    return sorted(rows, key=lambda row: -row["ms"])


def gradients(model: EmbeddingModel, images: Tensor, low: bool) -> dict[str, Tensor]:
    twin = copy.deepcopy(model)
    loss_of(twin, images, low).backward()
    return {name: p.grad.double() for name, p in twin.named_parameters() if p.grad is not None}


def differences(plain: EmbeddingModel, fused: EmbeddingModel, images: Tensor) -> dict[str, Any]:
    """Returns relative errors of gradients: of all parameters together, and of the worst tensor."""

    def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Any]:
        square = sum(float((a[name] - b[name]).square().sum()) for name in b)
        whole = sum(float(b[name].square().sum()) for name in b)
        worst = max(b, key=lambda name: float((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-12)))
        worst_error = float((a[worst] - b[worst]).norm() / b[worst].norm().clamp(min=1e-12))
        return {"all": (square / whole) ** 0.5, "worst": worst_error, "worst_tensor": worst}

    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    exact = gradients(plain, images, low=False)
    in_float32 = difference(gradients(fused, images, low=False), exact)
    torch.backends.cudnn.allow_tf32 = before
    in_plain, in_fused = gradients(plain, images, low=True), gradients(fused, images, low=True)
    return {
        "float32_fused_to_plain": in_float32,
        "bfloat16_fused_to_plain": difference(in_fused, in_plain),
        "bfloat16_plain_to_float32": difference(in_plain, exact),
        "bfloat16_fused_to_float32": difference(in_fused, exact),
    }


def measure(trunk: str, batch: int, side: int) -> dict[str, Any]:
    torch.manual_seed(0)
    images = torch.randn(batch, 3, side, side, device="cuda").to(memory_format=torch.channels_last)
    plain = build_model(trunk, weights="none").cuda().to(memory_format=torch.channels_last).train()
    fused = fuse(copy.deepcopy(plain))
    result: dict[str, Any] = {"trunk": trunk, "batch": batch, "side": side, "gradients": differences(plain, fused, images)}
    for name, model in (("plain", plain), ("fused", fused)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        replay = captured(training_step(model, images))
        torch.cuda.synchronize()
        prepared = time.perf_counter() - start
        result[name] = {
            **timed([replay], seconds=1.5),
            "seconds_to_prepare": prepared,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "kernels": kernels(replay),
        }
        del replay
    return result


def report(result: dict[str, Any]) -> None:
    plain, fused = result["plain"], result["fused"]
    print(f"\n{result['trunk']}, batch {result['batch']} at {result['side']}², one CUDA graph")
    for name, one in (("plain", plain), ("fused", fused)):
        print(
            f"  {name} {one['ms']:7.3f} ms ({one['least']:.3f} to {one['most']:.3f}), {one['peak_gb']:.2f} GB, "
            f"ready after {one['seconds_to_prepare']:.1f} s, kernels {sum(k['ms'] for k in one['kernels']):.3f} ms"
        )
    print(f"  fused / plain {fused['ms'] / plain['ms']:.3f}")
    for name, gap in result["gradients"].items():
        print(f"  gradients, {name:26} {gap['all']:.2e} of the norm; worst tensor {gap['worst']:.2e} ({gap['worst_tensor']})")
    for kernel in fused["kernels"][:12]:
        print(f"  {kernel['ms']:7.3f} ms {kernel['calls']:4d} x {kernel['kernel']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trunks", nargs="+", default=TRUNKS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=224)
    options = parser.parse_args()
    device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "when": time.strftime("%Y-%m-%d %H:%M")}
    results = []
    for trunk in options.trunks:
        result = measure(trunk, options.batch, options.side)
        report(result)
        results.append({**device, **result})
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
