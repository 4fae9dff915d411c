"""Pretrained networks as a source of features, and features kept by the content of what they are of."""
