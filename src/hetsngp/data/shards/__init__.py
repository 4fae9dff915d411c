"""Images in tar files, as WebDataset writes them."""
