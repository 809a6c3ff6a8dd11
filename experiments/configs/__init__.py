"""Config files: each defines get_config()."""
