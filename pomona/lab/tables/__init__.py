"""Tables: the papers' tables and figures, defined in TOML and filled from finished runs."""
