"""Search: an index of images that follows its folder, and the nearest images to a query."""
