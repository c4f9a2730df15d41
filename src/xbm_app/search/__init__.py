"""From a trained run to a search engine: an index of images that follows its folder, and the search in it."""
