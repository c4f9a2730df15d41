import numpy as np
from PIL import Image

from xbm_app.data.contact_sheet import Thumbnail, contact_sheet


def test_a_contact_sheet_places_and_frames_its_images():
    images = [Image.fromarray(np.full((5, 7), 10 * k, np.uint8)) for k in range(5)]
    rows = [
        [Thumbnail(images[0]), Thumbnail(images[1], (0, 255, 0))],
        [Thumbnail(k) for k in images[2:4]],
        [Thumbnail(images[4])],
    ]
    sheet = np.asarray(contact_sheet(rows))
    assert sheet.shape == (3 * 9, 2 * 11, 3)
    assert sheet[9 + 4, 11 + 5].tolist() == [30, 30, 30]
    assert sheet[0, 11].tolist() == [0, 255, 0] and sheet[0, 0].tolist() == sheet[20, 15].tolist() == [128] * 3


def test_captions_gaps_and_blank_rows_have_their_room():
    black = Image.new("RGB", (40, 30))
    rows = [[Thumbnail(black, "#ff0000", "words")], [], [Thumbnail(black)] * 2]
    sheet = np.asarray(contact_sheet(rows, frame=4, gap=5, caption=15, blank=14, background="white"))
    down = 30 + 2 * 4 + 15 + 5
    assert sheet.shape == (5 + 2 * down + 14, 5 + 2 * (40 + 2 * 4 + 5), 3)
    assert sheet[5, 5].tolist() == [255, 0, 0] and sheet[9, 9].tolist() == [0, 0, 0] and sheet[4, 5].tolist() == [255] * 3
    assert sheet[5 + down + 14 + 4, 9].tolist() == [0, 0, 0]  # the third row, whose frames have the color of the background
    caption = sheet[5 + 30 + 8 : 5 + down, 5:58]
    assert (caption < 255).any() and (sheet[5 + down : 5 + down + 14] == 255).all()
