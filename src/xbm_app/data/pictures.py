"""Images that were made rather than read, as files: to index them, to drop them on a page, to look at them."""

from pathlib import Path

from PIL import Image

from xbm_app.data.images import ImageSet


def write_pictures(images: ImageSet, folder: Path) -> Path:
    """Writes every image of a made set as `folder/CLASS/0.png` and so on, and returns the folder.

    Of a class's name only letters, digits and a few signs become part of a path.

    Example:
        >>> folder_name("U+0416 Ж"), folder_name("U+002F /")
        ('U+0416_Ж', 'U+002F')
    """
    assert images.pixels is not None
    names = [folder_name(name) for name in images.class_names]
    count = [0] * images.num_classes
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for pixels, label in zip(images.pixels, images.labels.tolist()):
        Image.fromarray(pixels).save(folder / names[label] / f"{count[label]}.png", compress_level=1)
        count[label] += 1
    return folder


def folder_name(label: str) -> str:
    words = ("".join(letter for letter in word if letter.isalnum() or letter in "+-") for word in label.split())
    return "_".join(word for word in words if word)
