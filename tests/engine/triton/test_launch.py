"""Starting kernels: the first call compiles, the next ones go straight to what was compiled."""

from xbm.engine.triton import launch


class Jitted:
    """What Triton's decorator returns, as far as starting goes."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getitem__(self, grid):
        def start(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return Ready(self.calls)

        return start


class Ready:
    def __init__(self, calls) -> None:
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("ready", grid, arguments))


def test_a_kernel_is_compiled_once_a_key(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    jitted = Jitted()
    kernel = launch.Kernel(jitted)
    for key in ("a", "a", "b", None, None):
        kernel(key if key is None else (key,), (2, 3, 1), 8, 3, 1, 2.5)
    compiled = ((2, 3, 1), (1, 2.5), {"num_warps": 8, "num_stages": 3})
    assert jitted.calls == [compiled, ("ready", (2, 3, 1), (1, 2.5)), compiled, compiled, compiled]
