"""Many images opened by several threads; one that cannot be read stops nothing."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from typing import TypeVar

from PIL import Image

from xbm.errors import InputError
from xbm_app.data.images import ImageSet
from xbm_app.data.ordered import default_workers, in_order
from xbm_app.progress import track

T = TypeVar("T")


def readable(
    images: ImageSet, make: Callable[[Image.Image], T], at_least: int, at_once: int, quiet: bool = False
) -> Iterator[tuple[dict[int, T], dict[int, InputError]]]:
    """What `make` makes of each image, by its index, `at_once` images at a time; and what is wrong with those that it cannot.

    Args:
        at_least: the side that a JPEG must be decoded to, see `ImageSet.open`.
    """
    calls = (partial(_made, images, make, at_least, index) for index in range(len(images)))
    with closing(in_order(calls, default_workers(), ahead=2 * at_once)) as results:
        tracked = enumerate(track(results, f"embedding {len(images):,} images", total=len(images), quiet=quiet))
        while batch := list(islice(tracked, at_once)):
            made, failed = dict[int, T](), dict[int, InputError]()
            for index, result in batch:
                if isinstance(result, InputError):
                    failed[index] = result
                else:
                    made[index] = result
            yield made, failed


def _made(images: ImageSet, make: Callable[[Image.Image], T], at_least: int, index: int) -> T | InputError:
    try:
        return make(images.open(index, at_least=at_least))
    except InputError as error:
        return error
