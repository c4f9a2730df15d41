"""The paper's six benchmarks and Omniglot, each read from the files of its official release."""

from pathlib import Path

from xbm.errors import InputError, unknown
from xbm_app.data.benchmarks.benchmark import Benchmark, Count, count
from xbm_app.data.benchmarks.cars import CARS
from xbm_app.data.benchmarks.cub import CUB
from xbm_app.data.benchmarks.deepfashion2 import DEEPFASHION2
from xbm_app.data.benchmarks.inshop import INSHOP
from xbm_app.data.benchmarks.omniglot import OMNIGLOT
from xbm_app.data.benchmarks.sop import SOP
from xbm_app.data.benchmarks.vehicleid import VEHICLEID
from xbm_app.data.images import Dataset

__all__ = ["BENCHMARKS", "Benchmark", "Count", "count", "get_benchmark", "read_benchmark"]

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark for benchmark in (SOP, INSHOP, VEHICLEID, CUB, CARS, DEEPFASHION2, OMNIGLOT)
}


def get_benchmark(name: str) -> Benchmark:
    """Returns the benchmark of that name; an unknown name is an error that suggests the nearest one."""
    if name not in BENCHMARKS:
        raise unknown("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]


def read_benchmark(name: str, root: str | Path) -> Dataset:
    """Reads a benchmark from the folder it was unpacked in.

    Example:
        >>> sorted(BENCHMARKS)
        ['cars', 'cub', 'deepfashion2', 'inshop', 'omniglot', 'sop', 'vehicleid']
    """
    benchmark, folder = get_benchmark(name), Path(root)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the one that {benchmark.title} was unpacked in")
    return benchmark.read(folder)
