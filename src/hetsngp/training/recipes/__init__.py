"""Recipe files: a training as a small TOML file."""
